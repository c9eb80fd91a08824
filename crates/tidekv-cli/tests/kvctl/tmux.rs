//! A real terminal to run our programs in: a tmux server of our own, gone with the value.
//!
//! ```text
//!   test ──keys──> tmux ──pty──> sh ──> kvtop
//!        <─screen─       <──────
//!        <──fifo── whatever is written to the terminal: it is time to look at the screen again
//! ```

use std::cell::Cell;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{World, path_with_our_binaries, patience};

/// A terminal of a certain size with a shell in it.
pub(crate) struct Terminal {
    /// The server's socket, in the world's own folder.
    socket: PathBuf,
    /// Says that something was written to the terminal.
    written: Receiver<()>,
    /// How many questions the shell was asked.
    asked: Cell<u32>,
}

/// What the shell asks with, so that its return can be seen.
const PROMPT: &str = "ready>";

impl Terminal {
    /// Starts a shell whose commands see the world's folder, and waits for its prompt.
    pub(crate) fn open(world: &World, columns: u16, rows: u16) -> Self {
        let fifo = world.path("tmux.fifo");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let (writes, written) = mpsc::channel();
        let terminal = Self { socket: world.path("tmux.socket"), written, asked: Cell::new(0) };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        let path = path_with_our_binaries();
        let folder = world.path("");
        let folder = folder.to_str().unwrap();
        let env_shell = format!(
            "env -u NO_COLOR PATH='{path}' KVCACHED_RUNTIME_DIR='{folder}' HOME='{folder}' TERM=screen-256color \
             LC_ALL=C.UTF-8 HISTFILE=/dev/null PS1='{PROMPT} ' sh"
        );
        let size = ["-x", columns.as_str(), "-y", rows.as_str()];
        let mut args = vec!["-f", "/dev/null", "new-session", "-d"];
        args.extend(size);
        args.push(&env_shell);
        terminal.tmux(&args);
        terminal.tmux(&["pipe-pane", "-O", &format!("exec cat > '{}'", fifo.display())]);
        thread::spawn(move || {
            // Ends with the terminal, whose `cat` then closes the fifo.
            let mut file = File::open(fifo).unwrap();
            while file.read(&mut [0; 4096]).is_ok_and(|length| length > 0) && writes.send(()).is_ok() {}
        });
        terminal.wait_for("the prompt", |screen| screen.contains(PROMPT));
        terminal
    }

    /// Makes the screen empty but for the prompt. What is typed before it is would vanish with the rest.
    #[track_caller]
    pub(crate) fn clear(&self) {
        self.line("clear");
        self.wait_for("an empty screen", |screen| screen.trim() == PROMPT);
    }

    /// Types a line at the next prompt, whoever asks, and Enter once it is there: the prompt that is waited for then is not the
    /// one before it.
    #[track_caller]
    pub(crate) fn line(&self, text: &str) {
        self.wait_for("a prompt", |screen| screen.trim_end().ends_with('>'));
        self.type_in(text);
        // However it is wrapped.
        let letters = |text: &str| text.split_whitespace().collect::<String>();
        self.wait_for(text, |screen| letters(screen).ends_with(&letters(text)));
        self.keys(&["Enter"]);
    }

    /// Presses keys by tmux's names: `q`, `Enter`, `C-c`, `Down`.
    pub(crate) fn keys(&self, keys: &[&str]) {
        let mut args = vec!["send-keys"];
        args.extend(keys);
        self.tmux(&args);
    }

    /// Makes the terminal another size.
    pub(crate) fn resize(&self, columns: u16, rows: u16) {
        self.tmux(&["resize-window", "-x", &columns.to_string(), "-y", &rows.to_string()]);
    }

    /// What is on the screen now, without colours.
    pub(crate) fn screen(&self) -> String {
        String::from_utf8(self.tmux(&["capture-pane", "-p"]).stdout).unwrap()
    }

    /// Types without Enter.
    pub(crate) fn type_in(&self, text: &str) {
        self.tmux(&["send-keys", "-l", "--", text]);
    }

    /// The same with the codes of colours and emphasis.
    pub(crate) fn coloured_screen(&self) -> String {
        String::from_utf8(self.tmux(&["capture-pane", "-p", "-e"]).stdout).unwrap()
    }

    /// What a command line prints in one line, `$?` of the command line before it included.
    #[track_caller]
    pub(crate) fn answer_to(&self, command: &str) -> String {
        // The question is on the screen too, and so are earlier answers: each has a number of its own.
        let number = self.asked.get() + 1;
        self.asked.set(number);
        self.line(&format!("echo answer-{number}=$({command}).end"));
        let start = format!("answer-{number}=");
        let answer = |screen: &str| {
            let line = screen.lines().find_map(|line| line.strip_prefix(&start)?.strip_suffix(".end"));
            line.map(str::to_owned)
        };
        let screen = self.wait_for("the answer", |screen| answer(screen).is_some());
        answer(&screen).unwrap()
    }

    /// The exit status of the last command line, as the shell sees it.
    #[track_caller]
    pub(crate) fn status_of_last(&self) -> String {
        self.answer_to("echo $?")
    }

    /// The modes of the line discipline, as `stty` writes them for itself.
    #[track_caller]
    pub(crate) fn line_modes(&self) -> String {
        self.answer_to("stty -g | cksum")
    }

    /// Ends the terminal under its programs, as a lost connection does.
    pub(crate) fn hang_up(self) {
        self.tmux(&["kill-server"]);
    }

    /// Terminal state that a program must give back, as tmux names it: 0 or 1 each for the alternate screen, a hidden
    /// cursor and a captured mouse.
    pub(crate) fn modes(&self) -> String {
        let format = "alternate=#{alternate_on} cursor=#{cursor_flag} mouse=#{mouse_any_flag}";
        let answer = self.tmux(&["display-message", "-p", format]);
        String::from_utf8(answer.stdout).unwrap().trim().to_owned()
    }

    /// Waits until the screen is as it should be, and returns it; fails with the screen after a minute.
    #[track_caller]
    pub(crate) fn wait_for(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let deadline = patience();
        loop {
            let screen = self.screen();
            if is_so(&screen) {
                return screen;
            }
            assert!(Instant::now() < deadline, "no sign of {what} on this screen:\n{screen}");
            // Now and then also without: another size, or a condition beside the screen.
            let _ = self.written.recv_timeout(Duration::from_millis(100));
            // All that was written so far is on the screen that is looked at next.
            while self.written.try_recv().is_ok() {}
        }
    }

    /// Waits until the shell's prompt is the last thing on the screen again.
    #[track_caller]
    pub(crate) fn wait_for_prompt(&self) -> String {
        self.wait_for("the prompt", |screen| screen.trim_end().lines().last().is_some_and(|line| line.trim() == PROMPT))
    }

    /// Waits until a program with these arguments runs in the terminal: keys are for it then, and not for who starts it.
    #[track_caller]
    pub(crate) fn wait_for_program(&self, program: &str, arguments: &str) {
        self.wait_for(program, |_| self.is_running(program, arguments));
    }

    fn is_running(&self, program: &str, arguments: &str) -> bool {
        // Its home is this world's folder, so it is not one of another test.
        let home = format!("HOME={}", self.socket.parent().unwrap().to_str().unwrap());
        let is_ours = |process: &Path| {
            let words = |file: &str| {
                let bytes = fs::read(process.join(file)).unwrap_or_default();
                String::from_utf8_lossy(&bytes).split_terminator('\0').map(str::to_owned).collect::<Vec<String>>()
            };
            let line = words("cmdline");
            line.first().is_some_and(|first| first == program)
                && line[1..].join(" ").contains(arguments)
                && words("environ").iter().any(|variable| variable.trim_end_matches('/') == home)
        };
        fs::read_dir("/proc").unwrap().any(|entry| is_ours(&entry.unwrap().path()))
    }

    #[track_caller]
    fn tmux(&self, args: &[&str]) -> Output {
        let output = Command::new("tmux").arg("-S").arg(&self.socket).args(args).output().expect("tmux is installed");
        assert!(output.status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A server that is gone already is what we want.
        let _ = Command::new("tmux").arg("-S").arg(&self.socket).arg("kill-server").output();
    }
}
