//! What a word may become: commands, flags, values and pool names, from kvctl's own definitions.
//!
//! ```text
//!   limit --wait 5s kvc|          walk the words before the last one ──> what is asked for here
//!   `---- before ---'`-'                                                 a command, a value, or the nth argument
//!                     last word                                          ──> what begins so, whatever the case
//! ```
//!
//! The prompt completes with it, and so do bash, zsh and fish through `kvctl names`: where a pool's name is asked for is
//! decided here alone. Which pools there are is looked up each time.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::{Arg, CommandFactory};
use rustyline::completion::Pair;
use rustyline::{Context, Helper};
use tidekv_shm::RuntimeDir;

use super::order::command_names;
use super::words::{quote, split};
use crate::cli::{Cli, is_pool_name};
use crate::scene::Scene;

/// Stands where the cursor is, so that the word there is found by splitting, in quotes or behind a blank. Of Unicode's
/// private use, and nobody types it.
const CURSOR: char = '\u{f8ff}';

/// Completes lines of the prompt.
pub(super) struct Completer {
    dir: RuntimeDir,
}

impl Completer {
    /// Pools are looked up in `dir`, unless the line names another folder.
    pub(super) fn new(dir: &RuntimeDir) -> Self {
        Self { dir: dir.clone() }
    }
}

impl rustyline::completion::Completer for Completer {
    type Candidate = Pair;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let typed = &line[..pos];
        // What comes after `!` is the system's.
        if typed.trim_start().starts_with('!') {
            return Ok((pos, Vec::new()));
        }
        let mut words = split(&format!("{typed}{CURSOR}")).words;
        let last = words.pop().and_then(|word| Some((word.start, word.text.strip_suffix(CURSOR)?.to_owned())));
        // In a comment there is nothing to complete.
        let Some((start, last)) = last else { return Ok((pos, Vec::new())) };
        let before: Vec<String> = words.into_iter().map(|word| word.text).collect();
        let names = || pool_names(&folder(&before).map_or_else(|| self.dir.clone(), RuntimeDir::at));
        let found = candidates(&before, &last, names);
        Ok((start, found.into_iter().map(|text| Pair { replacement: quote(&text) + " ", display: text }).collect()))
    }
}

impl Helper for Completer {}
impl rustyline::highlight::Highlighter for Completer {}
impl rustyline::validate::Validator for Completer {}
impl rustyline::hint::Hinter for Completer {
    type Hint = String;
}

/// Names of the pools that can be typed and shown: none with control characters, which a foreign file may have.
pub(in crate::command) fn pool_names(dir: &RuntimeDir) -> Vec<String> {
    // Completing is no place to complain.
    let Ok(scene) = Scene::look(dir) else { return Vec::new() };
    let mut names: Vec<String> = scene.pools.into_iter().map(|pool| pool.name).collect();
    names.retain(|name| !name.chars().any(char::is_control));
    names.dedup();
    names
}

/// What `last` may become behind the words `before`. `pools` is asked only where a pool is.
fn candidates(before: &[String], last: &str, pools: impl Fn() -> Vec<String>) -> Vec<String> {
    let definitions = definitions();
    let all = match wanted(&definitions, before, last) {
        Wanted::Command { at_prompt } => {
            let builtins: &[&str] = if at_prompt { &["help", "exit", "quit"] } else { &[] };
            command_names(&definitions).chain(builtins.iter().copied()).map(str::to_owned).collect()
        }
        Wanted::Flag(command) => flags(command),
        Wanted::Argument(arg) if is_pool_name(arg) => pools(),
        Wanted::Argument(arg) => values(arg),
        Wanted::Nothing => Vec::new(),
    };
    let begin = last.to_lowercase();
    all.into_iter().filter(|name| name.to_lowercase().starts_with(&begin)).collect()
}

/// Whether a pool's name is asked for where the last of `words` stands, and the folder that the words name.
pub(in crate::command) fn asks_for_pool(words: &[String]) -> (bool, Option<PathBuf>) {
    let (last, before) = words.split_last().map_or(("", &[][..]), |(last, before)| (last.as_str(), before));
    let definitions = definitions();
    let asks = matches!(wanted(&definitions, before, last), Wanted::Argument(arg) if is_pool_name(arg));
    (asks, folder(before))
}

/// kvctl's definitions, with what clap adds to them but its `help`: the prompt has its own.
fn definitions() -> clap::Command {
    let mut definitions = Cli::command().disable_help_subcommand(true);
    definitions.build();
    definitions
}

/// What a word is to be.
enum Wanted<'a> {
    Command { at_prompt: bool },
    Flag(&'a clap::Command),
    Argument(&'a Arg),
    Nothing,
}

fn wanted<'a>(definitions: &'a clap::Command, before: &[String], last: &str) -> Wanted<'a> {
    let mut before = before.iter().map(String::as_str).peekable();
    before.next_if_eq(&"kvctl");
    if before.next_if_eq(&"help").is_some() {
        return if before.next().is_none() { Wanted::Command { at_prompt: false } } else { Wanted::Nothing };
    }
    let mut command = definitions;
    let (mut option, mut arguments, mut flags_are_over): (Option<&Arg>, usize, bool) = (None, 0, false);
    for word in before {
        if option.take().is_some() {
            continue;
        }
        match word {
            "--" => flags_are_over = true,
            flag if is_flag(flag) && !flags_are_over => option = option_with_value(command, flag),
            _ if command.has_subcommands() => match command.find_subcommand(word) {
                Some(found) => command = found,
                None => return Wanted::Nothing,
            },
            _ => arguments += 1,
        }
    }
    match option {
        Some(option) if needs_value(option) => Wanted::Argument(option),
        _ if last.starts_with('-') && !flags_are_over => Wanted::Flag(command),
        _ if command.has_subcommands() => Wanted::Command { at_prompt: true },
        _ => nth_argument(command, arguments).map_or(Wanted::Nothing, Wanted::Argument),
    }
}

fn is_flag(word: &str) -> bool {
    word.len() > 1 && word.starts_with('-')
}

/// The option of this spelling whose value is the next word.
fn option_with_value<'a>(command: &'a clap::Command, flag: &str) -> Option<&'a Arg> {
    let is_it = |arg: &&Arg| match flag.strip_prefix("--") {
        Some(long) => arg.get_long() == Some(long),
        None => arg.get_short().is_some_and(|short| flag.chars().eq(['-', short])),
    };
    command.get_opts().find(is_it)
}

fn needs_value(option: &Arg) -> bool {
    option.get_num_args().is_some_and(|count| count.min_values() > 0)
}

/// The argument that comes nth, from 0; the last one may come any number of times.
fn nth_argument(command: &clap::Command, nth: usize) -> Option<&Arg> {
    let repeats = |arg: &&Arg| arg.get_num_args().is_some_and(|count| count.max_values() > 1);
    command.get_positionals().nth(nth).or_else(|| command.get_positionals().last().filter(repeats))
}

fn flags(command: &clap::Command) -> Vec<String> {
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    shown.filter_map(Arg::get_long).map(|long| format!("--{long}")).collect()
}

fn values(arg: &Arg) -> Vec<String> {
    arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect()
}

/// The value of `--dir`, where the words have one.
fn folder(words: &[String]) -> Option<PathBuf> {
    let mut words = words.iter().map(OsStr::new).map(OsStr::to_string_lossy);
    while let Some(word) = words.next() {
        if word == "--dir" {
            return words.next().map(|path| PathBuf::from(path.as_ref()));
        }
        if let Some(path) = word.strip_prefix("--dir=") {
            return Some(PathBuf::from(path));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What the last word of a line may become, with two pools.
    fn found(line: &str) -> Vec<String> {
        let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let last = words.pop().unwrap();
        candidates(&words, &last, || vec!["VLLM".to_owned(), "sglang".to_owned()])
    }

    const POOLS: [&str; 2] = ["VLLM", "sglang"];

    #[test]
    fn commands_at_the_beginning_and_after_help() {
        assert_eq!(found("li"), ["list", "limit", "limit-percent"]);
        assert_eq!(found("LIS"), ["list"]);
        assert_eq!(found("ex"), ["exit"]);
        assert_eq!(found("help wa"), ["watch"]);
        assert_eq!(found("kvctl wa"), ["watch"]);
        assert_eq!(found("--dir /tmp wa"), ["watch"]);
        assert_eq!(found("help watch "), [""; 0]);
        assert!(found("").contains(&"gc".to_owned()) && !found("").contains(&"names".to_owned()));
    }

    #[test]
    fn pool_names_where_one_is_asked_for() {
        for line in ["limit ", "share ", "trim ", "delete --force ", "list VLLM ", "watch 2 ", "kvtop -r 1 ", "events "]
        {
            assert_eq!(found(line), POOLS, "{line:?}");
        }
        assert_eq!(found("limit vl"), ["VLLM"]);
        assert_eq!(found("limit SG"), ["sglang"]);
        assert_eq!(found("limit --wait 5s V"), ["VLLM"]);
        assert_eq!(found("limit --wait V"), ["VLLM"], "its value may be left out");
        assert_eq!(found("delete -- V"), ["VLLM"]);
        for line in ["limit VLLM ", "share --weight ", "gc ", "watch -n ", "lsit ", "man "] {
            assert_eq!(found(line), [""; 0], "{line:?}");
        }
    }

    #[test]
    fn every_command_that_takes_a_pool_completes_it() {
        let definitions = definitions();
        for command in definitions.get_subcommands() {
            let takes_one = command.get_positionals().any(is_pool_name);
            let line = format!("{} v", command.get_name());
            assert_eq!(found(&line) == ["VLLM"], takes_one, "{line:?}");
        }
    }

    #[test]
    fn flags_and_values() {
        assert_eq!(found("list --j"), ["--json"]);
        assert!(found("share VLLM -").contains(&"--ceiling".to_owned()));
        assert!(found("list --").contains(&"--dir".to_owned()) && found("list --").contains(&"--help".to_owned()));
        assert_eq!(found("completions "), ["bash", "zsh", "fish"]);
        assert_eq!(found("completions --program kvt"), ["kvtop"]);
        assert_eq!(found("delete -- --f"), [""; 0]);
    }

    #[test]
    fn the_line_of_a_prompt() {
        use rustyline::completion::Completer as _;
        use rustyline::history::DefaultHistory;
        let history = DefaultHistory::new();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("my pool"), [1_i64, 0, 0].map(i64::to_ne_bytes).concat()).unwrap();
        std::fs::write(folder.path().join("bell\x07"), [1_i64, 0, 0].map(i64::to_ne_bytes).concat()).unwrap();
        let completer = Completer::new(&RuntimeDir::at(folder.path()));
        let complete = |line: &str| {
            let (start, found) = completer.complete(line, line.len(), &Context::new(&history)).unwrap();
            (start, found.into_iter().map(|pair| pair.replacement).collect::<Vec<_>>())
        };
        assert_eq!(complete("  lis"), (2, vec!["list ".to_owned()]));
        assert_eq!(complete("limit MY"), (6, vec!["'my pool' ".to_owned()]));
        assert_eq!(complete("limit "), (6, vec!["'my pool' ".to_owned()]));
        for open in ["limit 'my p", "limit 'my ", "limit my\\ ", "limit my\\", "limit \"my ", "limit \t'"] {
            assert_eq!(complete(open).1, ["'my pool' "], "{open:?}");
        }
        assert_eq!(complete("limit 'my pool' "), (16, vec![]));
        assert_eq!(complete("limit my # "), (11, vec![]), "a comment");
        assert_eq!(complete("list --dir /not/there "), (22, vec![]));
        assert_eq!(complete("!li"), (3, vec![]));
    }

    proptest! {
        #[test]
        fn any_words_can_be_completed(words in proptest::collection::vec(".{0,8}|list|limit|--wait|-n|--|help|--dir", 0..6)) {
            let last = words.last().cloned().unwrap_or_default();
            let before = &words[..words.len().saturating_sub(1)];
            for found in candidates(before, &last, || POOLS.map(str::to_owned).to_vec()) {
                prop_assert!(found.to_lowercase().starts_with(&last.to_lowercase()));
            }
        }
    }
}
