//! The screen cell by cell: golden pictures for people, and what must hold at any size for the machine.
//!
//! Golden pictures lie in `golden/`. After a wanted change, `KVTOP_GOLDEN=write cargo test -p tidekv-cli --lib golden`
//! writes them anew; the difference is reviewed like code.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;
use tidekv_core::share::MemoryUse;
use tidekv_core::units::Bytes;
use tidekv_shm::DeviceName;

use super::*;
use crate::command::top::collect::{PoolSample, Sample};
use crate::command::top::fixture::{device, foreign, place, pool, press, request, sample, seen, type_keys};
use crate::request::TopRequest;
use crate::scene;
use crate::text::width;

const SIZES: [(u16, u16); 3] = [(80, 24), (120, 40), (200, 50)];

fn buffer(state: &State, columns: u16, rows: u16, colour: bool) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    let style = Style { theme: Theme { colour }, folder: Path::new("/run/kv") };
    terminal.draw(|frame| draw(state, style, frame)).unwrap();
    terminal.backend().buffer().clone()
}

/// What is seen, line by line, without blanks at the ends.
fn lines(state: &State, columns: u16, rows: u16) -> Vec<String> {
    let buffer = buffer(state, columns, rows, false);
    let row = |y| {
        let mut line = String::new();
        let mut x = 0;
        while x < columns {
            let symbol = buffer[(x, y)].symbol();
            line.push_str(symbol);
            // A wide character covers the cell after it.
            x += u16::try_from(width(symbol)).unwrap().max(1);
        }
        line.trim_end().to_owned()
    };
    (0..rows).map(row).collect()
}

fn find<'a>(lines: &'a [String], part: &str) -> &'a str {
    lines.iter().find(|line| line.contains(part)).unwrap_or_else(|| panic!("no {part:?} in\n{}", lines.join("\n")))
}

/// What stands between the brackets of a line.
fn bar_of(line: &str) -> &str {
    let (from, to) = (line.find('[').unwrap() + 1, line.find(']').unwrap());
    &line[from..to]
}

fn count(text: &str, wanted: char) -> usize {
    text.chars().filter(|&c| c == wanted).count()
}

/// Three pools of different kinds over a few looks, on two devices.
fn three_pools() -> State {
    let look = |second: u64| {
        let mut vllm = pool("kvcached_vLLM_4711", 10 + second, 4, 40);
        place(&mut vllm).counters.maps = 1000 + 512 * second;
        place(&mut vllm).counters.unmaps = 7 * second;
        let mut sglang = pool("kvcached_SGLang_12", 17, 1, 20);
        sglang.state = scene::State::Draining;
        place(&mut sglang).demand = Bytes::gib(3);
        place(&mut sglang).fair = Bytes::gib(19);
        place(&mut sglang).revisions = (4, 3);
        place(&mut sglang).weight = 4;
        place(&mut sglang).pid = 12;
        let gpu = "GPU-8d1f2c9a-77aa-4b0e-9c11-0f5e2d3c4b5a";
        place(&mut vllm).device = DeviceName::new(gpu).unwrap();
        place(&mut sglang).device = DeviceName::new(gpu).unwrap();
        let devices = vec![device(gpu, 80, 32, 5, 8, 64), device("host", 128, 0, 0, 20, 96)];
        Sample { devices, pools: vec![vllm, sglang, foreign("theirs", 2, 1, 16)], troubles: Vec::new() }
    };
    let mut state = seen((0..6).map(look));
    press(&mut state, KeyCode::Down);
    state
}

fn many(count: usize) -> State {
    let pools = (0..count).map(|index| pool(&format!("pool-{index:03}"), (index % 10) as u64, 1, 10));
    seen([sample(pools.collect())])
}

// ---- golden pictures ----

#[track_caller]
fn golden(name: &str, state: &State, columns: u16, rows: u16) {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/command/top/draw/golden").join(format!("{name}.txt"));
    let mut shown = lines(state, columns, rows).join("\n");
    shown.push('\n');
    if env::var_os("KVTOP_GOLDEN").is_some() {
        fs::write(&path, &shown).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap();
    assert!(shown == expected, "{name} is now\n{shown}\nand was\n{expected}");
}

#[test]
fn golden_no_pools_80x24() {
    golden("none-80x24", &seen([Sample::default()]), 80, 24);
}

#[test]
fn golden_three_pools_at_each_size() {
    for (columns, rows) in SIZES {
        golden(&format!("three-{columns}x{rows}"), &three_pools(), columns, rows);
    }
}

#[test]
fn golden_help_and_details_80x24() {
    let mut state = three_pools();
    press(&mut state, KeyCode::Enter);
    golden("details-80x24", &state, 80, 24);
    press(&mut state, KeyCode::Char('h'));
    golden("help-80x24", &state, 80, 24);
}

#[test]
fn golden_strange_names_80x24() {
    let names = ["模型缓存-七号机器-生产环境", "cafe\u{301}", "evil\x1b[2J\nname", &"long".repeat(19), "🦀🦀"];
    let pools = names.map(|name| pool(name, 3, 1, 10)).to_vec();
    golden("names-80x24", &seen([sample(pools)]), 80, 24);
}

// ---- what the picture says ----

#[test]
fn bars_are_as_long_as_the_numbers_say() {
    for (columns, rows) in SIZES {
        let mut half = pool("half", 50, 20, 100);
        place(&mut half).fair = Bytes::gib(90);
        let screen = lines(&seen([sample(vec![half])]), columns, rows);
        let bar = bar_of(find(&screen, ">half"));
        let cells = bar.len();
        let near = |cells_shown: usize, percent: usize| (cells_shown * 100).abs_diff(percent * cells) <= 51;
        assert!(near(count(bar, '#'), 50), "{bar}");
        assert!(near(count(bar, '#') + count(bar, '='), 70), "{bar}");
        assert_eq!(bar.find('|'), Some(90 * cells / 100), "the share is at 90 %: {bar}");
        assert_eq!(count(bar, '#') + count(bar, '=') + count(bar, '-') + 1, cells, "{bar}");
    }
}

#[test]
fn demand_and_overflow_are_seen_without_colour() {
    let mut wanting = pool("wanting", 40, 10, 100);
    place(&mut wanting).demand = Bytes::gib(30);
    let screen = lines(&seen([sample(vec![wanting, pool("over", 30, 0, 20)])]), 200, 50);
    let bar = bar_of(find(&screen, "wanting"));
    // The mark at 50 % hides the first of them.
    assert!((count(bar, '+') + 1).abs_diff(bar.len() * 30 / 100) <= 1, "{bar}");
    assert!(find(&screen, "wanting").contains(" 30.0G "), "the number as well");
    let over = find(&screen, "over");
    assert!(bar_of(over).ends_with('>') && over.contains("150%!"), "{over}");
}

#[test]
fn devices_show_pools_others_free_and_the_budget() {
    for (columns, rows) in SIZES {
        let devices = vec![device("host", 100, 30, 10, 20, 70)];
        let state = seen([Sample { devices, ..Sample::default() }]);
        let screen = lines(&state, columns, rows);
        let line = find(&screen, "host ");
        let bar = bar_of(line);
        let cells = bar.len();
        let near = |shown: usize, percent: usize| (shown * 100).abs_diff(percent * cells) <= 101;
        assert!(near(count(bar, '#'), 43) && near(count(bar, '='), 14) && count(bar, 'o') == 0, "{bar}");
        assert!(line.ends_with("free 30.0G of 70.0G"), "30 of 40 free: {line}");
        let sums = if columns < 110 { "pools 40.0G" } else { "needed 30.0G  cached    0B  idle 10.0G" };
        assert!(line.contains(sums) && line.contains("other 20.0G"), "{line}");
    }
    // Without a budget the bar is the device's.
    let state = seen([Sample { devices: vec![device("host", 100, 30, 10, 20, 0)], ..Sample::default() }]);
    let screen = lines(&state, 80, 24);
    let line = find(&screen, "host ");
    assert!(bar_of(line).ends_with('o') && line.ends_with("free 40.0G of  100G"), "{line}");
    let unknown = seen([Sample { devices: vec![device("host", 0, 1, 0, 0, 0)], ..Sample::default() }]);
    assert!(find(&lines(&unknown, 80, 24), "host").contains("not known yet"));
}

#[test]
fn zero_one_three_and_200_pools_at_each_size() {
    for (columns, rows) in SIZES {
        for pools in [0, 1, 3, 200] {
            let mut state = many(pools);
            let screen = lines(&state, columns, rows);
            assert!(screen[0].starts_with("KVCache Memory Usage  12:00:00"), "{}", screen[0]);
            let counted = if pools == 1 { "  1 pool ".to_owned() } else { format!("  {pools} pools ") };
            assert!(screen[0].contains(&counted), "{}", screen[0]);
            assert!(screen.last().unwrap().starts_with("Press 'q' to quit"), "{screen:?}");
            let shown = screen.iter().filter(|line| line.contains("pool-")).count();
            let room = usize::from(rows) - 6;
            assert_eq!(shown, pools.min(room), "all of them, or as many as fit\n{}", screen.join("\n"));
            press(&mut state, KeyCode::End);
            let screen = lines(&state, columns, rows);
            let selected: Vec<_> = screen.iter().filter(|line| line.starts_with('>')).collect();
            if pools == 0 {
                assert!(selected.is_empty());
                assert!(find(&screen, "No active KVCached segments found.").len() <= usize::from(columns));
                assert!(screen.iter().any(|line| line.contains("/run/kv")), "{screen:?}");
            } else {
                assert_eq!(selected.len(), 1);
                assert!(selected[0].starts_with(&format!(">pool-{:03}", pools - 1)), "{selected:?}");
            }
        }
    }
}

#[test]
fn every_row_can_be_scrolled_to() {
    let mut state = many(200);
    for index in 0..200 {
        let screen = lines(&state, 80, 24);
        assert!(screen.iter().any(|line| line.starts_with(&format!(">pool-{index:03}"))), "{index}");
        press(&mut state, KeyCode::Down);
    }
}

#[test]
fn a_pool_that_dies_while_shown() {
    let with = |pools: &[PoolSample]| sample(pools.to_vec());
    let dead = PoolSample { state: scene::State::Dead, ..pool("b", 2, 1, 8) };
    let (a, b) = (pool("a", 1, 0, 8), pool("b", 2, 1, 8));
    let word = |state: &State| {
        let screen = lines(state, 80, 24);
        let row = screen.iter().find(|line| line.starts_with(" b "))?;
        row.split_whitespace().nth(1).map(str::to_owned)
    };
    let alive = with(&[a.clone(), b]);
    let gone = || with(std::slice::from_ref(&a));
    assert_eq!(word(&seen([alive.clone()])).as_deref(), Some("live"));
    assert_eq!(word(&seen([alive.clone(), with(&[a.clone(), dead])])).as_deref(), Some("dead"));
    assert_eq!(word(&seen([alive.clone(), gone()])).as_deref(), Some("gone"));
    let mut later = vec![alive];
    later.extend((0..7).map(|_| gone()));
    assert_eq!(word(&seen(later)), None);
}

#[test]
fn more_devices_than_room() {
    let devices = (0..20).map(|index| device(&format!("GPU-{index:02}"), 80, 1, 1, 1, 64)).collect();
    let screen = lines(&seen([Sample { devices, pools: vec![pool("a", 1, 0, 2)], troubles: Vec::new() }]), 80, 24);
    assert!(screen.contains(&"... 14 more devices".to_owned()), "{screen:#?}");
    assert!(screen.iter().any(|line| line.starts_with(">a ")));
}

#[test]
fn troubles_and_names_that_are_waited_for_are_said() {
    let mut state = State::new(&TopRequest { names: vec!["VLLM".to_owned(), "a".to_owned()], ..request() });
    state.observe(Sample::default(), Duration::ZERO, String::new());
    assert!(find(&lines(&state, 80, 24), "Waiting for").contains("VLLM, a: not there yet."));
    let troubles = vec!["pools on host are not shown in full: it is damaged".to_owned()];
    state.observe(Sample { troubles, ..sample(vec![pool("a", 1, 0, 2)]) }, Duration::from_secs(1), String::new());
    let screen = lines(&state, 80, 24);
    assert_eq!(screen[21], "pools on host are not shown in full: it is damaged");
    assert_eq!(screen[22], "Waiting for VLLM: not there yet.");
}

#[test]
fn filter_pause_and_order_are_seen() {
    let mut state = three_pools();
    type_keys(&mut state, "sr/vllm");
    let screen = lines(&state, 120, 40);
    assert!(screen[0].ends_with("1 of 3 pools  filter: vllm  sort: used reversed  every 1s"), "{}", screen[0]);
    assert!(screen[39].starts_with("filter: vllm_"), "{}", screen[39]);
    press(&mut state, KeyCode::Enter);
    press(&mut state, KeyCode::Char('p'));
    assert!(lines(&state, 80, 24)[0].starts_with("KVCache Memory Usage  12:00:05  PAUSED  1 of 3 pools  filter: vllm"));
    type_keys(&mut state, "/zzz");
    assert!(lines(&state, 80, 24).iter().any(|line| line.contains("No pool's name contains 'vllmzzz'.")));
}

#[test]
fn clicks_find_the_row_that_is_drawn_there() {
    let mut state = many(200);
    press(&mut state, KeyCode::End);
    let (area, screen) = (Rect::new(0, 0, 80, 24), lines(&state, 80, 24));
    for (y, line) in (0u16..).zip(&screen) {
        let clicked = row_at(area, &state, 5, y).map(|index| state.visible()[index].pool.label.clone());
        let drawn = line.get(1..9).filter(|name| name.starts_with("pool-")).map(str::to_owned);
        assert_eq!(clicked, drawn, "row {y}: {line}");
    }
}

#[test]
fn colour_follows_pressure_and_can_be_turned_off() {
    let pools = vec![pool("a-low", 4, 0, 10), pool("b-middle", 5, 0, 10), pool("c-high", 8, 0, 10)];
    let state = seen([sample(pools)]);
    let coloured = buffer(&state, 80, 24, true);
    let colour_of = |row: u16| {
        let cell = (0..80).map(|x| &coloured[(x, row)]).find(|cell| cell.symbol() == "#").unwrap();
        cell.fg
    };
    let first = (0..24).find(|&y| coloured[(1, y)].symbol() == "a").unwrap();
    assert_eq!([0, 1, 2].map(|row| colour_of(first + row)), [Color::Green, Color::Yellow, Color::Red]);
    let mut views = vec![state.clone(), three_pools()];
    for (mut state, key) in [(three_pools(), KeyCode::Enter), (three_pools(), KeyCode::Char('h'))] {
        press(&mut state, key);
        views.push(state);
    }
    for state in views {
        let plain = buffer(&state, 80, 24, false);
        assert!(plain.content.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    }
}

#[test]
fn everything_of_the_details_fits_80_columns() {
    let mut state = three_pools();
    press(&mut state, KeyCode::Enter);
    for key in [KeyCode::Home, KeyCode::Down, KeyCode::End] {
        press(&mut state, key);
        let [wide, narrow] = [200, 80].map(|columns| lines(&state, columns, 24));
        // All but the bar and the chart, which are as wide as the screen.
        assert_eq!(wide[4..14], narrow[4..14], "nothing is cut");
    }
}

// ---- at any size, in any state ----

fn any_pool() -> impl Strategy<Value = PoolSample> {
    let states = prop_oneof![
        Just(scene::State::Live),
        Just(scene::State::Draining),
        Just(scene::State::Dead),
        Just(scene::State::Returning),
        Just(scene::State::Kvcached),
    ];
    let sizes = prop_oneof![Just(0), 0..1u64 << 40, any::<u64>()];
    (".{0,20}", states, [(); 4].map(|()| sizes.clone()), any::<[u64; 4]>()).prop_map(|(name, state, sizes, more)| {
        let [limit, in_use, idle, fair] = sizes.map(Bytes);
        let mut pool = pool(&name, 0, 0, 0);
        (pool.state, pool.limit, pool.in_use, pool.idle) = (state, limit, in_use, idle);
        if state == scene::State::Kvcached {
            pool.place = None;
            pool.key.owner = None;
        } else {
            let place = place(&mut pool);
            (place.fair, place.demand, place.held) = (fair, Bytes(more[0]), Bytes(more[1]));
            (place.counters.maps, place.counters.unmaps) = (more[2], more[3]);
        }
        pool
    })
}

fn any_sample() -> impl Strategy<Value = Sample> {
    let device = (any::<[u64; 5]>(), "[A-Za-z0-9-]{1,40}").prop_map(|(sizes, name)| {
        let mut device = device(&name, 0, 0, 0, 0, 0);
        device.total = Bytes(sizes[0]);
        device.usage = MemoryUse { needed: Bytes(sizes[1]), cached: Bytes::ZERO, idle: Bytes(sizes[2]) };
        (device.non_pool, device.budget) = (Bytes(sizes[3]), Bytes(sizes[4]));
        device
    });
    let troubles = prop::collection::vec("[a-z ]{0,200}", 0..3);
    let parts = (prop::collection::vec(device, 0..6), prop::collection::vec(any_pool(), 0..30), troubles);
    parts.prop_map(|(devices, pools, troubles)| Sample { devices, pools, troubles })
}

fn any_key() -> impl Strategy<Value = KeyCode> {
    prop_oneof![
        prop::sample::select("hsSrp/jkgGx模".chars().collect::<Vec<_>>()).prop_map(KeyCode::Char),
        prop::sample::select(vec![
            KeyCode::Enter,
            KeyCode::Esc,
            KeyCode::Up,
            KeyCode::Down,
            KeyCode::PageDown,
            KeyCode::End,
            KeyCode::Backspace,
        ]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn nothing_panics_and_nothing_harmful_is_drawn(
        samples in prop::collection::vec(any_sample(), 1..4),
        keys in prop::collection::vec(any_key(), 0..12),
        columns in 0..260u16,
        rows in 0..70u16,
        colour: bool,
    ) {
        let mut state = seen(samples);
        for key in keys {
            state.key(KeyEvent::new(key, KeyModifiers::NONE));
        }
        let buffer = buffer(&state, columns, rows, colour);
        prop_assert_eq!((buffer.area.width, buffer.area.height), (columns, rows));
        for cell in &buffer.content {
            prop_assert!(cell.symbol().chars().all(crate::text::is_harmless), "{:?}", cell.symbol());
        }
        for line in lines(&state, columns, rows) {
            prop_assert!(width(&line) <= usize::from(columns), "{line:?}");
        }
        for y in 0..rows {
            let row = row_at(Rect::new(0, 0, columns, rows), &state, columns / 2, y);
            prop_assert!(row.is_none_or(|row| row < state.visible().len()));
        }
    }
}
