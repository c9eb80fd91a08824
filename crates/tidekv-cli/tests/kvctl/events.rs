//! `kvctl events`: history, filters, JSON, and following a device while it lives, dies and is born again.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStderr, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use tidekv_core::units::Bytes;
use tidekv_shm::{DeviceName, EventKind, Ledger, LedgerView, Note, Reason};

use crate::common::{Victim, World, patience};
use crate::tmux::Terminal;

/// Something that happened to a pool, told at once.
fn tell(world: &World, name: &str, kind: EventKind, bytes: u64) {
    let note = |view: &mut LedgerView| {
        let slot = view.entries.iter().find(|entry| entry.name == name).unwrap().slot;
        view.note(slot, Note::new(kind, Reason::Need, Bytes(bytes)));
    };
    world.ledger().update(patience(), note).unwrap();
}

/// The kinds and pools of lines for people.
fn kinds(text: &str) -> Vec<(String, String)> {
    let word = |line: &str, at: usize| line.split_whitespace().nth(at).unwrap_or("").to_owned();
    text.lines().map(|line| (word(line, 1), word(line, 2))).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(kind, name)| ((*kind).to_owned(), (*name).to_owned())).collect()
}

fn json_lines(text: &str) -> Vec<serde_json::Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_story_of_two_pools() {
    let world = World::new();
    let qwen = world.pool("qwen", Bytes::gib(2));
    world.device(Bytes::gib(8), Bytes::gib(4));
    let llama = world.pool("llama", Bytes::gib(2));
    let (code, text) = (world.kvctl(&["limit", "qwen", "1G"]), world.kvctl(&["share", "llama", "--weight", "4"]));
    assert_eq!((code.code, text.code), (0, 0));
    assert_eq!(world.kvctl(&["trim", "qwen"]).code, 0);
    drop(llama);
    let ran = world.kvctl(&["events"]);
    let (code, text) = ran.quiet();
    let expected = [
        ("joined", "qwen"),
        ("budget", "-"),
        ("joined", "llama"),
        ("limit-set", "qwen"),
        ("share-set", "llama"),
        ("trim-asked", "qwen"),
        ("left", "llama"),
    ];
    assert_eq!((code, kinds(text)), (0, pairs(&expected)), "{text}");
    assert!(text.contains("to 1 GiB by an operator") && text.contains("weight 4, priority 0"), "{text}");
    assert!(!text.contains('\x1b'), "no colour in a pipe");
    // Columns are aligned: the sentence begins at one place.
    let columns: Vec<_> =
        ["limit-set      qwen   to", "share-set      llama  weight"].map(|part| text.contains(part)).into();
    assert_eq!(columns, [true, true], "{text}");

    assert_eq!(kinds(&world.kvctl(&["events", "--last", "2"]).stdout), pairs(&expected[5..]));
    assert_eq!(world.kvctl(&["events", "-n", "0"]).quiet(), (0, ""));
    let of_llama = kinds(&world.kvctl(&["events", "llama"]).stdout);
    assert_eq!(of_llama, pairs(&[expected[2], expected[4], expected[6]]), "its past is there though it is gone");
    assert_eq!(kinds(&world.kvctl(&["events", "llama", "-n", "1"]).stdout), pairs(&[expected[6]]));
    drop(qwen);
    assert_eq!(world.files(), [] as [&str; 0]);
    assert!(world.kvctl(&["events"]).quiet().1.starts_with("No events"));
    assert_eq!(world.kvctl(&["events", "--json"]).quiet(), (0, ""));
}

#[test]
fn a_name_that_nobody_has_suggests_the_nearest() {
    let world = World::new();
    let _pool = world.pool("kvcached_qwen", Bytes::gib(1));
    drop(world.pool("gone_pool", Bytes::gib(1)));
    let ran = world.kvctl(&["events", "kvcached_qwem"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    assert!(ran.stderr.contains("'kvcached_qwem' not found") && ran.stderr.contains("Did you mean 'kvcached_qwen'?"));
    assert!(world.kvctl(&["events", "gone_poll"]).stderr.contains("Did you mean 'gone_pool'?"), "also of the past");
    let both = world.kvctl(&["events", "gone_pool", "nobody"]);
    assert_eq!((both.code, kinds(&both.stdout).len()), (1, 2), "{both:?}");
    // A pool of kvcached's own has no events, and that is no error.
    world.kvcached_segment("theirs", [1 << 30, 0, 0]);
    let theirs = world.kvctl(&["events", "theirs"]);
    assert_eq!((theirs.code, theirs.stdout.as_str()), (0, ""));
    assert!(theirs.stderr.contains("No events of 'theirs'"));
}

#[test]
fn json_has_every_word_of_an_event() {
    let world = World::new();
    let (_qwen, _llama) = (world.pool("qwen", Bytes::gib(1)), world.pool("llama", Bytes::gib(1)));
    world.device(Bytes::gib(8), Bytes::gib(4));
    let note = |view: &mut LedgerView| {
        let slot = |name: &str| view.entries.iter().find(|entry| entry.name == name).unwrap().slot;
        let note = Note::new(EventKind::Reclaimed, Reason::Neighbours, Bytes::mib(6));
        view.note(slot("qwen"), Note { free: Bytes(3), peer: Some(slot("llama")), ..note });
    };
    world.ledger().update(patience(), note).unwrap();
    let ran = world.kvctl(&["events", "--json"]);
    let rows = json_lines(ran.quiet().1);
    assert_eq!((rows.len(), &rows[2]["kind"]), (4, &serde_json::Value::from("budget")));
    let row = rows[3].as_object().unwrap();
    let keys: Vec<&str> = row.keys().map(String::as_str).collect();
    let expected = "time device sequence at_ms kind reason count ipc group pid slot bytes held_bytes demand_bytes \
                    share_bytes budget_bytes limit_bytes free_bytes weight priority peer text";
    assert_eq!(keys, expected.split_whitespace().collect::<Vec<_>>());
    let words = ["kind", "reason", "ipc", "peer", "device"].map(|key| row[key].as_str().unwrap());
    assert_eq!(words, ["reclaimed", "neighbours", "qwen", "llama", "host"]);
    let numbers = ["sequence", "count", "bytes", "free_bytes", "budget_bytes"].map(|key| row[key].as_u64().unwrap());
    assert_eq!(numbers, [4, 1, 6 << 20, 3, 4 << 30]);
    assert_eq!(row["pid"], std::process::id());
    assert!(
        row["time"].as_str().unwrap().ends_with('Z') && row["text"].as_str().unwrap().starts_with("-6 MiB for llama")
    );
    assert_eq!(rows[0]["kind"], "joined");
}

#[test]
fn several_devices_are_told_apart() {
    let world = World::new();
    let _host = world.pool("qwen", Bytes::gib(1));
    let gpu = DeviceName::new("GPU-1").unwrap();
    let ledger = Ledger::open(&world.dir(), &gpu).unwrap();
    let name = tidekv_shm::PoolName::new("llama").unwrap();
    let spec = tidekv_shm::EntrySpec::new(name, tidekv_core::units::GroupId(3), Bytes::mib(2));
    let _gpu = ledger.register(patience(), spec).unwrap();
    let ran = world.kvctl(&["events"]);
    let text = ran.quiet().1;
    assert_eq!(text.lines().count(), 2);
    assert!(text.contains("  host   joined         qwen      a limit"), "{text}");
    assert!(text.contains("  GPU-1  joined         llama_g3  a limit"), "{text}");
    assert_eq!(world.kvctl(&["events", "llama_g3"]).quiet().1.lines().count(), 1);
}

#[test]
fn what_cannot_be_read_is_said_and_the_rest_is_shown() {
    let world = World::new();
    let _pool = world.pool("qwen", Bytes::gib(1));
    let gpu = world.dir().events_path(&DeviceName::new("GPU-1").unwrap());
    fs::write(&gpu, [7; 100]).unwrap();
    let ran = world.kvctl(&["events"]);
    assert_eq!((ran.code, ran.stdout.lines().count()), (0, 1));
    assert!(ran.stderr.contains("warning: events of GPU-1 are not shown") && ran.stderr.contains("mode is"), "{ran:?}");
}

/// `kvctl events --follow`, running.
struct Following {
    child: Child,
    lines: Receiver<String>,
    said: BufReader<ChildStderr>,
}

impl Following {
    fn start(world: &World, args: &[&str]) -> Self {
        let mut command = world.command(&["events", "--follow"]);
        let mut child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = mpsc::channel();
        let (output, said) = (child.stdout.take().unwrap(), BufReader::new(child.stderr.take().unwrap()));
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, lines, said }
    }

    /// The next line on stderr; empty at the end.
    fn said(&mut self) -> String {
        let mut line = String::new();
        if self.said.buffer().is_empty() {
            let mut fds = [PollFd::new(self.said.get_ref(), PollFlags::IN)];
            let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
            assert_eq!(poll(&mut fds, Some(&minute)), Ok(1), "silent for a minute");
        }
        self.said.read_line(&mut line).unwrap();
        line
    }

    fn line(&self) -> String {
        self.lines.recv_timeout(Duration::from_secs(60)).expect("a line within a minute")
    }

    fn kind(&self) -> (String, String) {
        kinds(&self.line()).remove(0)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end: exit code, and what it said on stderr.
    fn end(mut self) -> (Option<i32>, String) {
        let mut text = String::new();
        loop {
            match self.said() {
                line if line.is_empty() => return (self.child.wait().unwrap().code(), text),
                line => text += &line,
            }
        }
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn following_survives_the_end_of_a_device_and_its_return() {
    let world = World::new();
    let first = world.pool("first", Bytes::gib(1));
    let follow = Following::start(&world, &[]);
    let expect = |kind: &str, name: &str| assert_eq!(follow.kind(), (kind.to_owned(), name.to_owned()));
    expect("joined", "first");
    for bytes in 1..=3 {
        tell(&world, "first", EventKind::Granted, bytes << 20);
        assert!(follow.line().contains(&format!("+{bytes} MiB")));
    }
    // Its file goes with the last pool, and the next pool makes another.
    drop(first);
    expect("left", "first");
    let second = world.pool("second", Bytes::gib(1));
    expect("joined", "second");
    tell(&world, "second", EventKind::Granted, 9 << 20);
    expect("granted", "second");
    // A pool that is killed is found dead by the next that looks.
    let victim = Victim::spawn(&world, "victim");
    expect("joined", "victim");
    let pid = victim.kill();
    second.change(|_| ());
    let died = follow.line();
    assert!(died.contains("died") && died.contains(&format!("pid {pid} is gone")), "{died}");
    assert!(follow.lines.try_recv().is_err(), "nothing is shown twice");
    follow.signal(Signal::INT);
    assert_eq!(follow.end(), (Some(0), String::new()), "Ctrl-C is how it ends");
}

#[test]
fn following_before_there_is_anything() {
    let world = World::new();
    let folder = world.path("later");
    let folder = folder.to_str().unwrap();
    let mut follow = Following::start(&world, &["--dir", folder, "--json", "qwen", "-n", "0"]);
    // It has looked when it says that there is nothing.
    let said = follow.said();
    assert!(said.contains("warning: IPC 'qwen' not found"), "{said}");
    let dir = tidekv_shm::RuntimeDir::at(folder);
    let _other = crate::common::Pool::new(&dir, "other", Bytes::gib(1));
    let _pool = crate::common::Pool::new(&dir, "qwen", Bytes::gib(1));
    let row = json_lines(&follow.line()).remove(0);
    assert_eq!((&row["kind"], &row["ipc"]), (&"joined".into(), &"qwen".into()));
    follow.signal(Signal::INT);
    assert_eq!(follow.end().0, Some(0));
}

#[test]
fn a_ring_that_was_faster_says_how_many_are_lost() {
    for json in [false, true] {
        let world = World::new();
        let _pool = world.pool("qwen", Bytes::gib(1));
        let follow = Following::start(&world, if json { &["--json"] } else { &[] });
        follow.line();
        follow.signal(Signal::STOP);
        for bytes in 0..4096 + 37 {
            tell(&world, "qwen", EventKind::Granted, bytes);
        }
        follow.signal(Signal::CONT);
        let missed = follow.line();
        if json {
            let row = json_lines(&missed).remove(0);
            assert_eq!((&row["kind"], &row["count"]), (&"missed".into(), &37.into()));
        } else {
            assert_eq!(missed, "... 37 events were overwritten before they could be read");
        }
        for _ in 0..4096 {
            assert!(follow.line().contains("granted"));
        }
    }
}

#[test]
fn following_ends_when_nobody_reads() {
    let world = World::new();
    let _pool = world.pool("qwen", Bytes::gib(1));
    let mut command = world.command(&["events", "--follow"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    output.read_line(&mut String::new()).unwrap();
    // No event comes: the pipe itself tells.
    drop(output);
    let said = BufReader::new(child.stderr.take().unwrap());
    let (_, lines) = mpsc::channel();
    assert_eq!(Following { child, lines, said }.end(), (Some(0), String::new()));
}

#[test]
fn on_a_terminal_there_is_colour_and_ctrl_c_gives_the_prompt_back() {
    let world = World::new();
    let _pool = world.pool("qwen", Bytes::gib(1));
    let terminal = Terminal::open(&world, 120, 30);
    terminal.line("kvctl events --follow; echo status=$?");
    terminal.wait_for("the past", |screen| screen.contains("joined"));
    tell(&world, "qwen", EventKind::Refused, 1 << 20);
    terminal.wait_for("a new event", |screen| screen.contains("refused"));
    terminal.keys(&["C-c"]);
    terminal.wait_for("the end", |screen| screen.contains("status=0"));
}

#[test]
fn gc_takes_events_away_that_have_no_ledger() {
    let world = World::new();
    let pool = world.pool("qwen", Bytes::gib(1));
    let path = world.dir().events_path(&DeviceName::host());
    let bytes = fs::read(&path).unwrap();
    let busy = world.kvctl(&["gc"]);
    assert_eq!(busy.quiet(), (0, "Nothing to remove.\n"), "those of a living pool stay");
    drop(pool);
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let events = format!("events {}: they have no ledger\n", path.display());
    assert_eq!(world.kvctl(&["gc", "--dry-run"]).quiet(), (0, format!("Would remove {events}").as_str()));
    assert_eq!(kinds(&world.kvctl(&["events"]).stdout), pairs(&[("joined", "qwen")]), "still there to be read");
    assert_eq!(world.kvctl(&["gc"]).quiet(), (0, format!("Removed {events}").as_str()));
    assert_eq!(world.files(), [] as [&str; 0]);
}

#[test]
fn after_a_crash_the_story_stays_until_gc() {
    let world = World::new();
    Victim::spawn(&world, "victim").kill();
    assert_eq!(kinds(&world.kvctl(&["events"]).stdout), pairs(&[("joined", "victim")]));
    assert_eq!(world.kvctl(&["list"]).quiet().1.matches("victim").count(), 1, "events are no pool");
    assert_eq!(world.kvctl(&["gc"]).code, 0);
    assert_eq!(world.files(), [] as [&str; 0]);
}
