//! Looks and keys in, rows out.

use ratatui::crossterm::event::KeyCode::{Backspace, Char, Down, End, Enter, Esc, Home, PageDown, Up};
use tidekv_shm::Counters;

use super::*;
use crate::command::top::fixture::{foreign, place, pool, press, request, sample, seen, type_keys};

fn names(state: &State) -> Vec<&str> {
    state.visible().iter().map(|track| track.pool.label.as_str()).collect()
}

fn selected(state: &State) -> &str {
    state.selected().map_or("", |track| track.pool.label.as_str())
}

fn three() -> Sample {
    let mut b = pool("b", 5, 5, 10);
    place(&mut b).demand = Bytes::gib(1);
    sample(vec![pool("a", 1, 20, 40), b, pool("c", 9, 0, 100)])
}

#[test]
fn every_order_and_its_reverse() {
    let mut state = seen([three()]);
    let orders = [
        ("name", ["a", "b", "c"]),
        ("used", ["c", "b", "a"]),
        ("held", ["a", "b", "c"]),
        ("demand", ["b", "a", "c"]),
        ("share", ["c", "a", "b"]),
        ("rate", ["a", "b", "c"]),
        ("pressure", ["b", "c", "a"]),
    ];
    for (sort, order) in orders {
        assert_eq!((state.choices().sort.name(), names(&state)), (sort, order.to_vec()));
        press(&mut state, Char('s'));
    }
    assert_eq!(state.choices().sort, SortKey::Name, "round and round");
    press(&mut state, Char('S'));
    assert_eq!(state.choices().sort, SortKey::Pressure);
    press(&mut state, Char('r'));
    assert_eq!(names(&state), ["a", "c", "b"]);
}

#[test]
fn pressure_orders_limits_of_zero_too() {
    let pools = vec![pool("empty", 0, 0, 0), pool("over", 1, 0, 0), pool("half", 5, 0, 10), pool("none", 0, 0, 10)];
    let mut state = seen([sample(pools)]);
    press(&mut state, Char('S'));
    assert_eq!(names(&state), ["over", "half", "empty", "none"]);
}

#[test]
fn rates_come_from_counters_between_two_looks() {
    let counted = |maps, unmaps| {
        let mut ours = pool("ours", 1, 0, 10);
        place(&mut ours).counters = Counters { maps, unmaps, ..Counters::default() };
        sample(vec![ours, foreign("theirs", 1, 0, 10)])
    };
    let mut state = seen([counted(100, 0)]);
    assert!(state.visible().iter().all(|track| track.change.is_none()));
    state.observe(counted(150, 5), Duration::from_millis(2000), String::new());
    let rates: Vec<_> = state.visible().iter().map(|track| track.change.unwrap().rates).collect();
    assert_eq!(rates, [Some(crate::change::Rates { maps: 25.0, unmaps: 2.5 }), None]);
}

#[test]
fn a_pool_that_was_started_again_is_another_pool() {
    let born = |pid| {
        let mut pool = pool("again", 1, 0, 10);
        pool.key.owner.as_mut().unwrap().pid = pid;
        place(&mut pool).counters.maps = if pid == 1 { 1_000_000 } else { 3 };
        sample(vec![pool])
    };
    let state = seen([born(1), born(1), born(2), born(2)]);
    let mut tracks: Vec<_> =
        state.visible().iter().map(|track| (track.word(), track.change, track.history.len())).collect();
    tracks.sort_by_key(|track| track.0);
    let rates = Some(crate::change::Rates { maps: 0.0, unmaps: 0.0 });
    let change = Some(Change { used_bytes: 0, held_bytes: 0, rates });
    assert_eq!(tracks, [("gone", None, 2), ("live", change, 2)]);
}

#[test]
fn a_pool_that_dies_is_kept_for_a_while_and_then_removed() {
    let mut state = seen([three()]);
    let without_b = || sample(vec![pool("a", 1, 20, 40), pool("c", 9, 0, 100)]);
    let words = |state: &State| state.visible().iter().map(|track| track.word()).collect::<Vec<_>>();
    state.observe(without_b(), Duration::from_secs(1), String::new());
    assert_eq!((names(&state), words(&state)), (vec!["a", "b", "c"], vec!["live", "gone", "live"]));
    state.observe(without_b(), Duration::from_secs(1) + GONE_FOR - Duration::from_millis(1), String::new());
    assert_eq!(names(&state), ["a", "b", "c"]);
    state.observe(without_b(), Duration::from_secs(1) + GONE_FOR, String::new());
    assert_eq!(names(&state), ["a", "c"]);
    state.observe(three(), Duration::from_secs(9), String::new());
    assert_eq!(words(&state), ["live", "live", "live"]);
}

#[test]
fn histories_are_bounded_and_keep_the_latest() {
    let state = seen((0..300).map(|used| sample(vec![pool("a", used, 0, 300)])));
    let history = &state.visible()[0].history;
    assert_eq!(history.len(), HISTORY);
    assert_eq!((history.front(), history.back()), (Some(&Bytes::gib(300 - 256)), Some(&Bytes::gib(299))));
}

#[test]
fn the_filter_is_typed_kept_and_cleared() {
    let mut state = seen([sample(vec![pool("Qwen-7B", 1, 0, 2), pool("llama", 1, 0, 2), pool("模型", 1, 0, 2)])]);
    type_keys(&mut state, "/qWq");
    assert!(names(&state).is_empty() && state.choices().typing, "q is a letter here");
    press(&mut state, Backspace);
    assert_eq!(names(&state), ["Qwen-7B"]);
    press(&mut state, Enter);
    assert!(!state.choices().typing && names(&state) == ["Qwen-7B"]);
    press(&mut state, Esc);
    assert_eq!(names(&state).len(), 3);
    type_keys(&mut state, "/型");
    assert_eq!(names(&state), ["模型"]);
    press(&mut state, Backspace);
    press(&mut state, Backspace);
    assert_eq!(state.choices().filter, "");
    type_keys(&mut state, "x");
    press(&mut state, Esc);
    assert_eq!((names(&state).len(), state.choices().typing), (3, false));
}

#[test]
fn a_pause_freezes_the_picture_while_looks_go_on() {
    let mut state = seen([sample(vec![pool("a", 1, 0, 10)])]);
    press(&mut state, Char('p'));
    for second in 1..=3 {
        state.observe(
            sample(vec![pool("a", 5, 0, 10), pool("b", 1, 0, 2)]),
            Duration::from_secs(second),
            String::new(),
        );
    }
    assert!(state.is_paused());
    assert_eq!((names(&state), state.visible()[0].pool.in_use), (vec!["a"], Bytes::gib(1)));
    press(&mut state, Char('p'));
    assert_eq!((names(&state), state.visible()[0].history.len()), (vec!["a", "b"], 4));
}

#[test]
fn the_selection_stays_with_its_pool_and_then_with_its_place() {
    let mut state = seen([three()]);
    assert_eq!(selected(&state), "a");
    press(&mut state, Down);
    assert_eq!(selected(&state), "b");
    type_keys(&mut state, "s");
    assert_eq!((selected(&state), state.selected_index()), ("b", Some(1)));
    type_keys(&mut state, "/c");
    assert_eq!(selected(&state), "c", "what was selected is not visible");
    press(&mut state, Esc);
    for (key, name) in [(Home, "c"), (Up, "c"), (End, "a"), (Down, "a"), (Home, "c"), (PageDown, "a")] {
        press(&mut state, key);
        assert_eq!(selected(&state), name, "{key:?}");
    }
    let later = |second| Duration::from_secs(second);
    state.observe(sample(vec![pool("c", 9, 0, 100)]), later(1), String::new());
    state.observe(sample(vec![pool("c", 9, 0, 100)]), later(10), String::new());
    assert_eq!(selected(&state), "c", "the last row that is left");
    state.observe(sample(Vec::new()), later(20), String::new());
    state.observe(sample(Vec::new()), later(30), String::new());
    assert_eq!((selected(&state), state.selected_index()), ("", None));
}

#[test]
fn views_open_and_close() {
    let mut state = seen([three()]);
    for (key, view) in [
        (Char('h'), View::Help),
        (Esc, View::Pools),
        (Char('?'), View::Help),
        (Char('h'), View::Pools),
        (Enter, View::Details),
        (Down, View::Details),
        (Enter, View::Pools),
        (Enter, View::Details),
        (Esc, View::Pools),
        (Enter, View::Details),
        (Char('/'), View::Pools),
    ] {
        press(&mut state, key);
        assert_eq!(state.choices().view, view, "{key:?}");
    }
}

#[test]
fn what_leaves_and_what_does_not() {
    let control = |letter| KeyEvent::new(Char(letter), KeyModifiers::CONTROL);
    let mut state = seen([three()]);
    assert_eq!(press(&mut state, Char('q')), Flow::Leave);
    assert_eq!(press(&mut state, Char('x')), Flow::Stay);
    assert_eq!([state.key(control('c')), state.key(control('z'))], [Flow::Leave, Flow::Suspend]);
    type_keys(&mut state, "/q");
    assert_eq!(state.key(control('c')), Flow::Leave, "also while typing");
    state.key(control('u'));
    assert_eq!(state.choices().filter, "");
}

#[test]
fn clicks_select_and_open() {
    let mut state = seen([three()]);
    state.click(2);
    assert_eq!((selected(&state), state.choices().view), ("c", View::Pools));
    state.click(2);
    assert_eq!(state.choices().view, View::Details);
    state.click(99);
    assert_eq!(selected(&state), "c");
    state.scroll(-1);
    assert_eq!(selected(&state), "b");
}

#[test]
fn names_that_were_asked_for_are_waited_for() {
    let mut state = State::new(&TopRequest { names: vec!["a".to_owned(), "z".to_owned()], ..request() });
    assert_eq!(state.missing(), ["a", "z"]);
    state.observe(sample(vec![pool("a", 1, 0, 2)]), Duration::ZERO, String::new());
    assert_eq!(state.missing(), ["z"]);
}

#[test]
fn a_look_that_failed_takes_nothing_away() {
    let mut state = seen([three()]);
    state.observe_failure("no more file descriptors".to_owned(), "12:34:56".to_owned());
    assert_eq!(names(&state), ["a", "b", "c"]);
    assert_eq!(state.picture().sample.troubles, ["no more file descriptors"]);
    state.observe(three(), Duration::from_secs(1), String::new());
    assert!(state.picture().sample.troubles.is_empty());
}
