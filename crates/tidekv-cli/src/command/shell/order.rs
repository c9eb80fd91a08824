//! What a line asks for. Only decides: nothing is started, nothing is written.
//!
//! ```text
//!   line ──┬─ begins with `!` ─────────────> System    the one kind that a system shell sees
//!          ├─ empty, a comment ────────────> Nothing
//!          ├─ exit, quit ──────────────────> Leave
//!          ├─ help, help COMMAND, --help ──> Show      from kvctl's own definitions
//!          ├─ a command that clap accepts ─> Command   arguments of kvctl
//!          └─ anything else ───────────────> Refusal   in words, with the nearest command
//! ```
//!
//! kvcached passes a line that it does not understand to the system's shell; a typing error at its prompt can delete
//! files. Here a line is either understood or refused.

use std::ffi::OsString;
use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};

use super::words::{Open, Split, split};
use crate::cli::{Cli, Command};
use crate::text::nearest;

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Nothing.
    Nothing,
    /// Leave the shell.
    Leave,
    /// Print this.
    Show(String),
    /// Run kvctl with these arguments.
    Command(Vec<OsString>),
    /// Have the system's shell carry this out.
    System(String),
}

/// Why a line is not carried out, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refusal(String);

/// Words of the prompt that kvctl itself does not have.
pub(super) const BUILTINS: [(&str, &str); 3] = [
    ("help [COMMAND]", "Show the commands, or how to use one"),
    ("exit", "Leave (also: quit, Ctrl-D)"),
    ("!LINE", "Have the system's shell carry out LINE"),
];

/// What pipes and redirects are written with. Here they would be taken for names of pools.
const OPERATORS: [&str; 10] = ["|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1"];

/// What a line asks for. `dir` is the folder of commands that do not name their own.
pub(super) fn order(line: &str, dir: &Path) -> Result<Order, Refusal> {
    let line = line.trim();
    if let Some(command) = line.strip_prefix('!') {
        return match command.trim() {
            "" => Err(Refusal("`!` needs a line for the system's shell behind it, as in `!df /dev/shm`.".to_owned())),
            command => Ok(Order::System(command.to_owned())),
        };
    }
    let Split { words, open } = split(line);
    match open {
        Some(Open::Quote(quote)) => return Err(Refusal(format!("The quote {quote} is not closed."))),
        Some(Open::Backslash) => return Err(Refusal("The backslash at the end has nothing behind it.".to_owned())),
        None => {}
    }
    if let Some(operator) = words.iter().find(|word| !word.quoted && OPERATORS.contains(&word.text.as_str())) {
        let operator = &operator.text;
        return Err(Refusal(format!(
            "{operator} works in the system's shell alone, as in `!kvctl list | head`; '{operator}' in quotes is a word."
        )));
    }
    let mut words: Vec<String> = words.into_iter().map(|word| word.text).collect();
    // As it stands in the examples of the help.
    let is_whole = words.first().is_some_and(|word| word == "kvctl");
    if is_whole {
        words.remove(0);
    }
    match words.first().map(String::as_str) {
        None if is_whole => Err(already_here()),
        None => Ok(Order::Nothing),
        Some("exit" | "quit") if words.len() == 1 => Ok(Order::Leave),
        Some(word @ ("exit" | "quit")) => Err(Refusal(format!("`{word}` takes no arguments."))),
        Some("help" | "?") => help(&words[1..]).map(Order::Show),
        Some(_) => command(words, dir),
    }
}

fn already_here() -> Refusal {
    Refusal("This is kvctl's shell already; `help` shows its commands.".to_owned())
}

/// A command of kvctl, if clap accepts it.
fn command(mut words: Vec<String>, dir: &Path) -> Result<Order, Refusal> {
    name_the_interval(&mut words);
    let cli = match Cli::try_parse_from(["kvctl"].into_iter().chain(words.iter().map(String::as_str))) {
        Ok(Cli { command: None | Some(Command::Shell(_)), .. }) => return Err(already_here()),
        Ok(cli) => cli,
        Err(answer) if !answer.use_stderr() => return Ok(Order::Show(text_of(&answer))),
        Err(answer) if answer.kind() == ErrorKind::InvalidSubcommand => return Err(unknown(&answer)),
        Err(answer) => return Err(Refusal(text_of(&answer))),
    };
    let mut args = Vec::new();
    if cli.dir.is_none() {
        args.extend(["--dir".into(), dir.into()]);
    }
    args.extend(words.into_iter().map(OsString::from));
    Ok(Order::Command(args))
}

/// `watch 2` is `watch -n 2`, as at kvcached's prompt.
fn name_the_interval(words: &mut Vec<String>) {
    let is_number =
        |word: &String| word.parse::<f64>().is_ok() && word.starts_with(|first: char| first.is_ascii_digit());
    if words[0] == "watch" && words.get(1).is_some_and(is_number) {
        words.insert(1, "-n".to_owned());
    }
}

fn text_of(answer: &clap::Error) -> String {
    answer.render().to_string().trim_end().to_owned()
}

fn unknown(answer: &clap::Error) -> Refusal {
    let word = match answer.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(word)) => word.as_str(),
        _ => return Refusal(text_of(answer)),
    };
    let theirs = match answer.get(ContextKind::SuggestedSubcommand) {
        Some(ContextValue::Strings(words)) => words.first().cloned(),
        Some(ContextValue::String(word)) => Some(word.clone()),
        _ => None,
    };
    no_such_command(word, theirs)
}

fn no_such_command(word: &str, otherwise: Option<String>) -> Refusal {
    let definitions = Cli::command();
    let names = command_names(&definitions).chain(["help", "exit", "quit"]);
    let meant = nearest(word, names).map(str::to_owned).or(otherwise);
    let meant = meant.map(|name| format!(" Did you mean '{name}'?")).unwrap_or_default();
    Refusal(format!(
        "Unknown command '{word}'.{meant}\n\
         Nothing was run. `help` shows the commands; a line for the system's shell begins with `!`."
    ))
}

/// The commands that people are told of.
pub(super) fn command_names(definitions: &clap::Command) -> impl Iterator<Item = &str> {
    definitions.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name)
}

/// The help of the prompt, or of a command.
fn help(words: &[String]) -> Result<String, Refusal> {
    let Some(word) = words.first() else { return Ok(overview(&Cli::command())) };
    if let Some((how, what)) = BUILTINS.iter().find(|(how, _)| how.split(' ').next() == Some(word)) {
        return Ok(format!("{how}: {what}"));
    }
    match Cli::try_parse_from(["kvctl", word, "--help"]) {
        Err(answer) if answer.kind() == ErrorKind::DisplayHelp => Ok(text_of(&answer)),
        _ => Err(no_such_command(word, None)),
    }
}

fn overview(definitions: &clap::Command) -> String {
    let mut lines = vec!["Commands:".to_owned()];
    let mut row = |how: &str, what: &str| lines.push(format!("  {how:<15} {what}"));
    for command in definitions.get_subcommands().filter(|command| !command.is_hide_set()) {
        if command.get_name() != "shell" {
            row(command.get_name(), &command.get_about().map(ToString::to_string).unwrap_or_default());
        }
    }
    BUILTINS.into_iter().for_each(|(how, what)| row(how, what));
    lines.push(
        "Tab completes commands, flags and names of pools. `watch 2` looks every 2 s; Ctrl-C ends it.".to_owned(),
    );
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ask(line: &str) -> Result<Order, Refusal> {
        order(line, Path::new("/run/pools"))
    }

    fn args(line: &str) -> Vec<String> {
        match ask(line) {
            Ok(Order::Command(args)) => args.into_iter().map(|arg| arg.into_string().unwrap()).collect(),
            other => panic!("{line:?}: {other:?}"),
        }
    }

    fn refusal(line: &str) -> String {
        ask(line).expect_err(line).to_string()
    }

    #[test]
    fn commands_get_the_folder_of_the_shell_unless_they_name_one() {
        assert_eq!(args("list --json"), ["--dir", "/run/pools", "list", "--json"]);
        assert_eq!(args("kvctl limit 'my pool' 1G"), ["--dir", "/run/pools", "limit", "my pool", "1G"]);
        assert_eq!(args("list --dir /elsewhere"), ["list", "--dir", "/elsewhere"]);
        assert_eq!(args("--dir /elsewhere list"), ["--dir", "/elsewhere", "list"]);
    }

    #[test]
    fn a_bare_number_is_the_interval_of_watch() {
        assert_eq!(args("watch 2")[2..], ["watch", "-n", "2"]);
        assert_eq!(args("watch 0.5 VLLM")[2..], ["watch", "-n", "0.5", "VLLM"]);
        assert_eq!(args("watch VLLM 2")[2..], ["watch", "VLLM", "2"], "a pool of that name");
        assert_eq!(args("watch -n 1 2")[2..], ["watch", "-n", "1", "2"]);
        assert_eq!(args("watch inf")[2..], ["watch", "inf"]);
        assert_eq!(args("kvtop 2")[2..], ["kvtop", "2"]);
    }

    #[test]
    fn lines_that_are_not_commands() {
        for line in ["", "   ", "# nothing", "  # nothing"] {
            assert_eq!(ask(line), Ok(Order::Nothing), "{line:?}");
        }
        assert_eq!(ask(" exit "), Ok(Order::Leave));
        assert_eq!(ask("quit"), Ok(Order::Leave));
        assert_eq!(ask(" ! df | head '"), Ok(Order::System("df | head '".to_owned())));
    }

    #[test]
    fn refusals_say_what_to_do() {
        for (line, part) in [
            ("lsit", "Did you mean 'list'?"),
            ("lsit", "Nothing was run"),
            ("LIST", "Did you mean 'list'?"),
            ("exti", "Did you mean 'exit'?"),
            ("touch /tmp/x", "Unknown command 'touch'"),
            ("rm -rf /", "Unknown command 'rm'"),
            ("--dir /tmp lsit", "Did you mean 'list'?"),
            ("limit VLLM", "Usage: kvctl limit"),
            ("limit", "<NAME>"),
            ("gc extra", "Usage: kvctl gc"),
            ("list --jsno", "--json"),
            ("shell", "already"),
            ("kvctl", "already"),
            ("kvctl shell", "already"),
            ("--dir /tmp", "already"),
            ("list 'VLLM", "not closed"),
            ("list \"VLLM", "not closed"),
            ("list VLLM\\", "backslash"),
            ("list | head", "`!kvctl list | head`"),
            ("list > log", "system's shell"),
            ("!", "!df"),
            ("exit 3", "no arguments"),
            ("help lsit", "Did you mean 'list'?"),
            ("help --dir", "Unknown command '--dir'"),
        ] {
            assert!(refusal(line).contains(part), "{line:?}: {}", refusal(line));
        }
        assert_eq!(args("list '|'")[2..], ["list", "|"]);
    }

    #[test]
    fn help_is_that_of_the_definitions() {
        let Ok(Order::Show(overview)) = ask("help") else { panic!("no help") };
        let definitions = Cli::command();
        for name in command_names(&definitions).filter(|&name| name != "shell") {
            assert!(overview.contains(&format!("\n  {name} ")), "{name} is not in {overview}");
            let Ok(Order::Show(own)) = ask(&format!("help {name}")) else { panic!("no help for {name}") };
            assert!(own.contains(&format!("Usage: kvctl {name}")) && own.contains("Examples:"), "{own}");
            assert_eq!(ask(&format!("{name} --help")), Ok(Order::Show(own)));
        }
        assert!(matches!(ask("help exit"), Ok(Order::Show(text)) if text.contains("Ctrl-D")));
        assert!(matches!(ask("--version"), Ok(Order::Show(text)) if text.starts_with("kvctl ")));
    }

    /// Lines as people mistype them, and lines made of what shells give a meaning to.
    fn lines() -> impl Strategy<Value = String> {
        let shell = "[a-z/;&|$()`<>*?!#'\"\\\\ {}~=-]{0,40}";
        let words = proptest::collection::vec(
            prop_oneof![
                "list|limit|watch|gc|share|kvctl|sh|touch|rm",
                "-{1,2}[a-z]{1,8}",
                "[0-9]{1,3}G?",
                "[|;&$`!]{1,2}"
            ],
            0..6,
        );
        prop_oneof![".{0,60}".prop_map(String::from), shell, words.prop_map(|words| words.join(" "))]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn only_a_bang_reaches_the_system_and_only_what_clap_accepts_is_run(line in lines()) {
            match ask(&line) {
                Ok(Order::System(command)) => {
                    prop_assert_eq!(line.trim().strip_prefix('!').map(str::trim), Some(command.as_str()));
                }
                Ok(Order::Command(args)) => {
                    let cli = Cli::parse_args([OsString::from("kvctl")].into_iter().chain(args)).expect("as asked");
                    prop_assert!(!matches!(cli.command, None | Some(Command::Shell(_))));
                    prop_assert!(!line.trim().starts_with('!'));
                }
                Ok(Order::Nothing | Order::Leave | Order::Show(_)) => {}
                Err(Refusal(words)) => prop_assert!(!words.is_empty()),
            }
        }
    }
}
