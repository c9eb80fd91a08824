//! However it ends, nothing stays: no process, no segment, no folder.

use std::time::Instant;

use rustix::process::Signal;

use crate::supervisor::{PATIENCE, Supervisor, marked, run, two_models};

/// Does not end when it is told to, and has a child that has left its group and its session.
const STUBBORN: &str = "instances:\n  - name: stubborn\n    model: m\n    engine: command\n    command: [sh, -c, \
                        \"trap '' TERM; (setsid sleep 1000 &); echo started; while :; do sleep 1; done\", --port, 1]\n";

#[test]
fn after_a_kill_of_the_supervisor_gc_leaves_nothing() {
    let mut up = Supervisor::start(&two_models(""));
    up.wait_until_ready("a");
    up.wait_until_ready("b");
    assert_eq!(up.complete("a").0, 200);
    let id = up.id();
    assert_eq!(marked(&id).len(), 2);
    up.signal(Signal::KILL);
    up.wait();
    let (code, text, error) = run(up.dir.path(), &["gc"]);
    assert_eq!(code, 0, "{error}");
    assert!(text.contains("its supervisor is gone"), "{text}");
    assert_eq!((marked(&id), up.files()), (Vec::new(), Vec::new()));
    assert!(run(up.dir.path(), &["gc"]).1.contains("Nothing to remove"));
}

#[test]
fn what_does_not_want_to_end_is_ended_by_gc() {
    let mut up = Supervisor::start(STUBBORN);
    up.wait_for_line("stubborn | started");
    let id = up.id();
    assert!(marked(&id).len() >= 2, "the shell and the one that left its session");
    up.signal(Signal::KILL);
    up.wait();
    let (code, _, error) = run(up.dir.path(), &["gc", "--dry-run"]);
    assert_eq!(code, 0, "{error}");
    assert!(!marked(&id).is_empty(), "a dry run ends nothing");
    let (code, text, error) = run(up.dir.path(), &["gc"]);
    assert_eq!((code, marked(&id)), (0, Vec::new()), "{text}{error}");
    assert_eq!(up.files(), Vec::<String>::new());
}

#[test]
fn the_second_signal_does_not_wait() {
    let mut up = Supervisor::start(STUBBORN);
    up.wait_for_line("stubborn | started");
    let id = up.id();
    up.signal(Signal::INT);
    up.wait_for_line("is being stopped");
    up.signal(Signal::INT);
    assert_eq!(up.wait().code(), Some(0));
    assert_eq!((marked(&id), up.files()), (Vec::new(), Vec::new()));
}

/// A supervisor whose output went to a full disk left what it had started, and removed the folder by which `gc` would have found it.
#[test]
fn a_screen_that_cannot_be_written_is_no_reason_to_leave_anything_running() {
    let mut up = Supervisor::start_unseen(STUBBORN);
    let id = up.id();
    let deadline = Instant::now() + PATIENCE;
    while marked(&id).len() < 2 {
        assert!(Instant::now() < deadline, "it starts all the same");
    }
    up.signal(Signal::TERM);
    assert_eq!(up.wait().code(), Some(0));
    assert_eq!((marked(&id), up.files()), (Vec::new(), Vec::new()));
}

/// vLLM and SGLang name their processes, and the library that does it writes over the environment unless it is told not to.
#[test]
fn engines_are_told_to_leave_the_mark_alone() {
    let up = Supervisor::start(
        "instances:\n  - {name: a, model: m, engine: command, command: [sh, -c, 'echo noenv $SPT_NOENV; sleep 1000', --port, 1]}\n",
    );
    up.wait_for_line("a | noenv 1");
}

#[test]
fn down_stops_it_and_says_so() {
    let mut up = Supervisor::start(&two_models(""));
    up.wait_until_ready("a");
    let id = up.id();
    let (code, text, error) = run(up.dir.path(), &["down"]);
    assert_eq!(code, 0, "{text}{error}");
    assert!(text.starts_with("Stopped supervisor"), "{text}");
    assert_eq!(up.wait().code(), Some(0));
    assert_eq!((marked(&id), up.files()), (Vec::new(), Vec::new()));
    let (code, _, error) = run(up.dir.path(), &["down"]);
    assert_eq!((code, error.as_str()), (1, "Nothing runs.\n"));
}
