//! `kvctl shell`: at a prompt in a real terminal, and from a pipe.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;
use tidekv_core::units::Bytes;

use crate::common::{World, make_program};
use crate::tmux::Terminal;

const BANNER: &str = "Entering kvcached shell. Type 'help' for commands, 'exit' to quit.";
const PROMPT: &str = "kvcached>";

/// The last line on the screen, without blanks at its end.
fn last_line(screen: &str) -> &str {
    screen.trim_end().lines().last().unwrap_or_default().trim_end()
}

impl Terminal {
    /// Starts the shell and waits for its prompt.
    fn start_shell(&self) {
        self.line("kvctl");
        self.wait_for("the banner and the prompt", |screen| screen.contains(BANNER) && last_line(screen) == PROMPT);
    }

    /// Waits until this is typed behind the prompt, and nothing else.
    #[track_caller]
    fn wait_for_line(&self, text: &str) -> String {
        let line = format!("{PROMPT} {text}");
        self.wait_for(&line, |screen| last_line(screen) == line.trim_end())
    }

    /// Enters a line at the prompt and waits for what it says and for the next prompt.
    #[track_caller]
    fn ask(&self, line: &str, answer: &str) {
        self.line(line);
        let asked = format!("{PROMPT} {line}\n");
        self.wait_for(answer, |screen| {
            let after = screen.rsplit_once(&asked).map_or("", |(_, after)| after);
            after.contains(answer) && last_line(screen) == PROMPT
        });
    }

    fn leave_shell(&self) {
        self.line("exit");
        self.wait_for_prompt();
    }
}

#[test]
fn a_session() {
    let world = World::new();
    let _pool = world.pool("qwen-chat", Bytes::gib(1));
    let terminal = Terminal::open(&world, 100, 40);
    // To the world's folder, which is its home.
    terminal.line("cd && stty -g > before");
    terminal.wait_for_prompt();
    let modes = terminal.modes();
    terminal.start_shell();

    // Tab: a command, a flag, a pool whatever the case, and a pool that came only now.
    terminal.type_in("lis");
    terminal.keys(&["Tab"]);
    terminal.type_in("--js");
    terminal.keys(&["Tab"]);
    terminal.wait_for_line("list --json");
    terminal.keys(&["C-c"]);
    terminal.wait_for_line("");
    terminal.type_in("limit QW");
    terminal.keys(&["Tab"]);
    terminal.wait_for_line("limit qwen-chat");
    terminal.type_in("2G");
    terminal.keys(&["Enter"]);
    let updated = "kvcached> limit qwen-chat 2G\nUpdated kv cache limit for qwen-chat to 2.00 GB";
    terminal.wait_for(updated, |screen| screen.contains(updated) && last_line(screen) == PROMPT);
    world.kvcached_segment("later", [1 << 30, 0, 0]);
    terminal.type_in("share l");
    terminal.keys(&["Tab"]);
    terminal.wait_for_line("share later");

    // Ctrl-C: the line is dropped, nothing was run.
    terminal.keys(&["C-c"]);
    terminal.wait_for_line("");

    terminal.ask("lsit", "Did you mean 'list'?");
    let file = world.path("made-by-a-shell");
    terminal.ask("touch made-by-a-shell", "Unknown command 'touch'");
    terminal.ask("list > made-by-a-shell", "system's shell alone");
    assert!(!file.exists());
    terminal.ask("!echo $((1 + 1)) | tr 2 z", "z\n");
    terminal.ask("!exit 3", "Exit status: 3");
    terminal.ask("limit qwen-chat", "Usage: kvctl limit <NAME> <SIZE>");
    terminal.ask("help trim", "Usage: kvctl trim");
    terminal.ask("shell", "This is kvctl's shell already");
    terminal.ask("list 'qwen", "not closed");
    terminal.ask("list", "qwen-chat                     2.00 GB");

    terminal.leave_shell();
    terminal.line("echo code=$?; stty -g > after");
    terminal.wait_for("the exit code", |screen| screen.contains("\ncode=0\n"));
    terminal.wait_for_prompt();
    assert_eq!(terminal.modes(), modes);
    assert_eq!(fs::read_to_string(world.path("after")).unwrap(), fs::read_to_string(world.path("before")).unwrap());
}

#[test]
fn the_end_of_input_and_words_that_leave() {
    let world = World::new();
    let terminal = Terminal::open(&world, 80, 24);
    for leave in [&["C-d"][..], &["q", "u", "i", "t", "Enter"]] {
        terminal.start_shell();
        terminal.keys(leave);
        terminal.wait_for_prompt();
        terminal.line("echo code=$?");
        terminal.wait_for("the exit code", |screen| screen.contains("\ncode=0\n"));
        terminal.clear();
    }
}

#[test]
fn history_outlives_a_session_and_is_private() {
    let world = World::new();
    let terminal = Terminal::open(&world, 80, 24);
    terminal.start_shell();
    terminal.ask("list", "No active KVCached segments found.");
    terminal.ask(" list --json", "[]");
    terminal.leave_shell();
    let file = world.path(".kvctl_history");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);

    terminal.start_shell();
    terminal.keys(&["Up"]);
    terminal.wait_for_line("exit");
    terminal.keys(&["Up"]);
    terminal.wait_for_line("list");
    terminal.keys(&["C-c"]);
    terminal.wait_for_line("");
    terminal.leave_shell();
    assert!(!fs::read_to_string(&file).unwrap().contains("--json"), "a line that begins with a blank is not kept");

    // A home that cannot be written is no reason to say anything.
    terminal.line("clear; HOME=/proc/nowhere kvctl");
    let screen = terminal.wait_for("the banner", |screen| screen.contains(BANNER) && last_line(screen) == PROMPT);
    assert_eq!(screen.trim_end().lines().count(), 2, "{screen}");
    terminal.ask("list", "No active KVCached segments found.");
    terminal.leave_shell();
}

#[test]
fn ctrl_c_ends_the_command_and_not_the_shell() {
    let world = World::new();
    let _pool = world.pool("qwen-chat", Bytes::gib(1));
    let terminal = Terminal::open(&world, 100, 40);
    terminal.start_shell();
    // It waits in the kernel, for a pool that does not answer.
    terminal.line("limit qwen-chat 512M --wait 1h");
    terminal.wait_for("a limit that is waited for", |screen| screen.contains("Updated kv cache limit"));
    terminal.keys(&["C-c"]);
    terminal.wait_for_line("");
    terminal.line("!echo $((6 * 7)); sleep 3600");
    terminal.wait_for("a command of the system", |screen| screen.contains("\n42\n"));
    // A shell that is just about to become the program loses the signal.
    terminal.wait_for_program("sleep", "3600");
    terminal.keys(&["C-c"]);
    terminal.wait_for_line("");
    // One that could not put the terminal back itself.
    terminal.ask("!stty raw -echo; kill -KILL $$", "ended by signal 9");
    terminal.ask("list", "qwen-chat");
    terminal.leave_shell();
}

#[test]
fn screens_in_the_shell() {
    let world = World::new();
    let _pool = world.pool("qwen-chat", Bytes::gib(1));
    let terminal = Terminal::open(&world, 100, 40);
    terminal.start_shell();
    let modes = terminal.modes();
    for (line, key) in [("watch 1", "C-c"), ("kvtop", "q"), ("kvtop", "C-c")] {
        terminal.keys(&["C-l"]);
        terminal.wait_for("an empty screen", |screen| screen.trim_end() == PROMPT);
        terminal.line(line);
        terminal.wait_for(line, |screen| screen.contains("qwen-chat"));
        terminal.keys(&[key]);
        terminal.wait_for_line("");
        assert_eq!(terminal.modes(), modes, "{line}");
    }
    terminal.keys(&["C-l"]);
    terminal.wait_for("an empty screen", |screen| screen.trim_end() == PROMPT);
    terminal.line("events --follow");
    // It may have nothing to show.
    terminal.wait_for_program("kvctl", "events --follow");
    terminal.keys(&["C-c"]);
    let is_over = |screen: &str| last_line(screen) == PROMPT && screen.contains("events --follow");
    let screen = terminal.wait_for("the prompt", is_over);
    assert!(!screen.contains("error") && !screen.contains("panicked"), "{screen}");
    terminal.leave_shell();
}

#[test]
fn from_a_pipe() {
    let world = World::new();
    world.kvcached_segment("theirs", [1 << 30, 0, 0]);
    for args in [&[][..], &["shell"]] {
        assert_eq!(world.kvctl_reading(args, b"").quiet(), (0, ""), "nothing to do");
    }
    let ran = world.kvctl_reading(&[], b"# two commands\n\nnames\n  kvctl limit theirs 2G\n");
    assert_eq!(ran.quiet(), (0, "theirs\nUpdated kv cache limit for theirs to 2.00 GB (2147483648 bytes)\n"));

    let ran = world.kvctl_reading(&[], b"list nobody\nlimit theirs\n!exit 7\nnames\nexit\nnames\n");
    assert_eq!((ran.code, ran.stdout.as_str()), (7, "theirs\n"), "{ran:?}");
    for part in ["IPC 'nobody' not found", "Usage: kvctl limit", "Exit status: 7"] {
        assert!(ran.stderr.contains(part), "{part}: {ran:?}");
    }
    assert_eq!(world.kvctl_reading(&[], b"list nobody\nnames\n").code, 1);
    // Commands do not eat the lines that follow them.
    assert_eq!(world.kvctl_reading(&[], b"!cat\nnames").quiet(), (0, "theirs\n"));
}

#[test]
fn the_folder_given_at_the_start_holds_for_every_line() {
    let (world, other) = (World::new(), World::new());
    world.kvcached_segment("here", [1 << 30, 0, 0]);
    other.kvcached_segment("elsewhere", [1 << 30, 0, 0]);
    let folder = other.path("");
    let folder = folder.to_str().unwrap();
    assert_eq!(world.kvctl_reading(&["--dir", folder], b"names\nnames").quiet(), (0, "elsewhere\nelsewhere\n"));
    assert_eq!(world.kvctl_reading(&["shell", "--dir", folder], b"names").quiet(), (0, "elsewhere\n"));
    assert_eq!(world.kvctl_reading(&[], format!("names --dir {folder}").as_bytes()).quiet(), (0, "elsewhere\n"));
}

/// A folder with a program that leaves a file behind when it is run, as the only one on the path.
fn trap(world: &World) -> (String, impl Fn() -> bool) {
    let folder = world.path("bin");
    fs::create_dir(&folder).unwrap();
    let (program, mark) = (folder.join("canary"), world.path("it-was-run"));
    make_program(&program, &format!(": > '{}'", mark.display()));
    (folder.to_str().unwrap().to_owned(), move || mark.exists())
}

fn run_with_trap(world: &World, bin: &str, lines: &[String]) -> std::process::ExitStatus {
    let input = world.path("input");
    fs::write(&input, lines.join("\n")).unwrap();
    let path = format!("{bin}:{}", std::env::var("PATH").unwrap());
    let mut command = world.command(&[]);
    let command = command.env("PATH", path).current_dir(bin).stdin(fs::File::open(input).unwrap());
    command.output().unwrap().status
}

/// Lines that name the program in every way that a shell would understand, and that are no command of ours.
fn hostile_lines(bin: &str) -> impl Strategy<Value = Vec<String>> {
    let whole = format!("{bin}/canary");
    let program = prop_oneof![Just("canary".to_owned()), Just("./canary".to_owned()), Just(whole)];
    let shape = prop_oneof![
        Just("{}"),
        Just("\t{} "),
        Just("$({})"),
        Just("`{}`"),
        Just("; {}"),
        Just(";{};"),
        Just("&& {}"),
        Just("| {}"),
        Just("list; {}"),
        Just("list | {}"),
        Just("list && {}"),
        Just("list $({})"),
        Just("list `{}`"),
        Just("list\\\n{}"),
        Just("'{}'"),
        Just("\"$({})\""),
        Just("list > {}"),
        Just("list '!{}'"),
        Just("# !{}"),
        Just("help !{}"),
        Just("exec {}"),
        Just("sh -c {}"),
        Just("env {}"),
        Just("list \"`{}`\""),
        Just("lsit !{}"),
        Just("\\!{}"),
    ];
    let junk = "[^\\n!]{0,6}";
    let line = (shape, program, junk).prop_map(|(shape, program, junk)| shape.replace("{}", &program) + &junk);
    proptest::collection::vec(line, 1..40)
}

#[test]
fn no_line_without_a_bang_runs_a_program_or_ends_the_shell() {
    let world = World::new();
    let (bin, was_run) = trap(&world);
    let config = ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(mut lines in hostile_lines(&bin))| {
        // The last line is carried out: nothing before it ended the shell.
        lines.push("!exit 42".to_owned());
        let status = run_with_trap(&world, &bin, &lines);
        prop_assert_eq!(status.code(), Some(42));
        prop_assert!(!was_run());
        prop_assert_eq!(fs::read_dir(&bin).unwrap().count(), 1, "no file was made");
    });
    assert!(run_with_trap(&world, &bin, &["!canary".to_owned()]).success());
    assert!(was_run(), "the trap works");
}
