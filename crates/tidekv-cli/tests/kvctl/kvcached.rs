//! kvcached's own tools beside ours, at the same time: a Python process that opens, locks and maps a segment the way
//! theirs do.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use tidekv_core::units::Bytes;

use crate::common::{World, words};

/// Answers lines on stdin: `read` and `limit N` as kvcached's tools do it, `hold` takes the lock for good.
const TOOL: &str = r#"
import fcntl, mmap, struct, sys
path = sys.argv[1]
held = []
for line in sys.stdin:
    command, *args = line.split()
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_SH if command == "read" else fcntl.LOCK_EX)
        access = mmap.ACCESS_READ if command == "read" else mmap.ACCESS_WRITE
        with mmap.mmap(file.fileno(), 24, access=access) as memory:
            if command == "limit":
                memory[0:8] = struct.pack("=q", int(args[0]))
            print(*struct.unpack("=3q", memory[:24]), flush=True)
        if command == "hold":
            held.append(open(path, "r+b"))
            fcntl.flock(file, fcntl.LOCK_UN)
            fcntl.flock(held[-1], fcntl.LOCK_EX)
            print("held", flush=True)
        else:
            fcntl.flock(file, fcntl.LOCK_UN)
"#;

struct Tool {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Tool {
    fn on(world: &World, name: &str) -> Self {
        let mut child = Command::new("python3")
            .args(["-c", TOOL])
            .arg(world.path(name))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("these tests need python3");
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, answers }
    }

    fn ask(&mut self, command: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
        self.answer()
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        // Its stdin closes with it; nothing of it outlives the test.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn their_tools_see_our_numbers_and_ours_see_theirs() {
    let world = World::new();
    let pool = world.pool("ours", Bytes::gib(1));
    let mut tool = Tool::on(&world, "ours");
    assert_eq!(tool.ask("read"), "1073741824 0 0");
    pool.uses(Bytes::mib(2), Bytes::mib(4));
    assert_eq!(tool.ask("read"), "1073741824 2097152 4194304");
    assert_eq!(world.kvctl(&["limit", "ours", "512M"]).code, 0);
    assert_eq!(tool.ask("read"), "536870912 2097152 4194304");
    assert_eq!(tool.ask("limit 268435456"), "268435456 2097152 4194304");
    let ran = world.kvctl(&["list", "ours"]);
    assert!(ran.quiet().1.contains("ours                        256.00 MB      2.00 MB   0.8 % "), "{ran:?}");
    assert_eq!(pool.segment.limit(), Some(Bytes::mib(256)));
}

#[test]
fn their_tool_stopped_with_the_lock_does_not_stop_ours() {
    let world = World::new();
    world.kvcached_segment("theirs", [1 << 30, 7, 0]);
    let mut tool = Tool::on(&world, "theirs");
    tool.ask("hold");
    assert_eq!(tool.answer(), "held");
    assert!(world.kvctl(&["list"]).quiet().1.contains("theirs                        1.00 GB       7.00 B   0.0 %"));
    let ran = world.kvctl(&["limit", "theirs", "2G"]);
    assert!(ran.error().contains("may be stopped"), "{ran:?}");
    assert_eq!(words(&world.path("theirs"))[0], 1 << 30);
}
