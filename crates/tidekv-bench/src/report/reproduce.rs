//! The command that makes a result again.
//!
//! A result that has its own command line says it. Of others it is put together from `args`, and what comes out is
//! checked with the very parser that will read it: a flag that kvbench would refuse is left out and named.

use std::ffi::OsString;

use clap::CommandFactory;
use serde_json::Value;

use super::words;
use crate::cli::Cli;
use crate::runs::{Run, Tool};

/// A command, and what is to be known about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reproduction {
    pub(super) command: String,
    /// What the command does not say.
    pub(super) note: Option<String>,
}

/// How to make the result of a run again.
pub(super) fn of(run: &Run) -> Reproduction {
    match run.extra.get("command") {
        Some(Value::Array(words)) if !words.is_empty() && words.iter().all(Value::is_string) => {
            let mut words: Vec<String> = words.iter().map(super::words).collect();
            // Where the program lies on one machine is of no use on another.
            words[0] = words[0].rsplit('/').next().unwrap_or_default().to_owned();
            Reproduction { command: quoted(&without_secrets(without_outputs(words))), note: None }
        }
        Some(Value::String(command)) if !command.is_empty() => Reproduction { command: command.clone(), note: None },
        _ => match run.tool {
            Tool::Kvbench => ours(run),
            Tool::Vllm => theirs(run, &["vllm", "bench", "serve"]),
            Tool::Sglang => theirs(run, &["python", "-m", "sglang.bench_serving"]),
            Tool::Aiperf => theirs(run, &["aiperf", "profile"]),
        },
    }
}

fn ours(run: &Run) -> Reproduction {
    let command = Cli::command();
    let mut words = vec!["kvbench".to_owned(), run.name.clone()];
    let Some(subcommand) = command.find_subcommand(&run.name) else {
        let note = format!("this kvbench has no benchmark called {:?}", run.name);
        return Reproduction { command: quoted(&words), note: Some(note) };
    };
    let mut left_out = Vec::new();
    for (name, value) in &run.args {
        match flag(subcommand, name, value) {
            Some(flag) if is_accepted(&words, &flag) => words.extend(flag),
            Some(flag) if flag.is_empty() => {}
            _ => left_out.push(format!("{name} {}", self::words(value))),
        }
    }
    let note = (!left_out.is_empty()).then(|| format!("not a flag of this kvbench: {}", left_out.join(", ")));
    Reproduction { command: quoted(&without_secrets(words)), note }
}

/// The words of a flag for an argument; none where saying nothing says it; `None` where there is no such flag.
fn flag(subcommand: &clap::Command, name: &str, value: &Value) -> Option<Vec<String>> {
    if value.is_null() || *value == Value::Bool(false) {
        return Some(Vec::new());
    }
    // Lists have the plural of their flag, and some arguments their unit.
    let long = name.replace('_', "-");
    let spellings =
        [long.as_str(), long.strip_suffix('s').unwrap_or(&long), long.strip_suffix("-bytes").unwrap_or(&long)];
    let argument = spellings
        .iter()
        .find_map(|spelling| subcommand.get_arguments().find(|argument| argument.get_long() == Some(*spelling)))?;
    let flag = format!("--{}", argument.get_long()?);
    let takes_value = argument.get_action().takes_values();
    Some(match value {
        Value::Bool(_) if !takes_value => vec![flag],
        Value::Array(items) => vec![flag, items.iter().map(self::words).collect::<Vec<_>>().join(",")],
        Value::Object(_) => return None,
        other => vec![flag, self::words(other)],
    })
}

fn is_accepted(words: &[String], flag: &[String]) -> bool {
    !flag.is_empty() && Cli::parse_args(words.iter().chain(flag).map(OsString::from)).is_ok()
}

/// What others say about a run, as the flags that they have for it.
fn theirs(run: &Run, program: &[&str]) -> Reproduction {
    let mut words: Vec<String> = program.iter().map(|word| (*word).to_owned()).collect();
    for (name, flag) in [
        ("backend", "--backend"),
        ("model_id", "--model"),
        ("tokenizer_id", "--tokenizer"),
        ("dataset_name", "--dataset-name"),
        ("num_prompts", "--num-prompts"),
        ("request_rate", "--request-rate"),
        ("burstiness", "--burstiness"),
        ("max_concurrency", "--max-concurrency"),
        ("random_input_len", "--random-input-len"),
        ("random_output_len", "--random-output-len"),
    ] {
        if let Some(value) = run.args.get(name).filter(|value| !value.is_null()) {
            words.extend([flag.to_owned(), self::words(value)]);
        }
    }
    let note = "put together from the result, which does not hold every flag (such as the data that was sent)";
    Reproduction { command: quoted(&words), note: Some(note.to_owned()) }
}

/// Where results went is no part of what was measured, and running the command again must not replace them.
fn without_outputs(words: Vec<String>) -> Vec<String> {
    const WITH_VALUE: [&str; 4] = ["--output", "--csv", "--output-dir", "--log-file"];
    const ALONE: [&str; 3] = ["--json", "--quiet", "-q"];
    let mut kept = Vec::with_capacity(words.len());
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let name = word.split('=').next().unwrap_or_default();
        if WITH_VALUE.contains(&name) {
            if name == word {
                words.next();
            }
        } else if !ALONE.contains(&word.as_str()) {
            kept.push(word);
        }
    }
    kept
}

/// What follows a flag for a key or a header is nobody's business.
fn without_secrets(mut words: Vec<String>) -> Vec<String> {
    const SECRET: [&str; 5] = ["key", "token", "password", "header", "authorization"];
    let is_secret = |flag: &str| {
        flag.starts_with("--")
            && SECRET.iter().any(|part| flag.split('-').any(|word| word == *part || word == format!("{part}s")))
    };
    for place in 0..words.len() {
        let (name, has_value) =
            words[place].split_once('=').map_or((words[place].clone(), false), |(name, _)| (name.to_owned(), true));
        if !is_secret(&name) {
            continue;
        }
        if has_value {
            words[place] = format!("{name}=...");
        } else if let Some(value) = words.get_mut(place + 1).filter(|value| !value.starts_with("--")) {
            "...".clone_into(value);
        }
    }
    words
}

/// As a shell takes it.
fn quoted(words: &[String]) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "-_./:=,@%+".contains(character);
    let quote = |word: &String| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    };
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostInfo;
    use crate::result::BenchResult;
    use serde_json::{Map, json};

    fn run(name: &str, args: &Value, extra: Value) -> Run {
        let Value::Object(extra) = extra else { panic!("an object") };
        Run::of_result(BenchResult::new(name, args, HostInfo::default()).unwrap(), extra)
    }

    #[test]
    fn a_command_that_was_kept_is_the_command() {
        let kept = run(
            "serve",
            &json!({}),
            json!({"command": ["/opt/x/kvbench", "serve", "--api-key", "s3cret", "--label", "a b's"]}),
        );
        assert_eq!(of(&kept).command, r"kvbench serve --api-key ... --label 'a b'\''s'");
    }

    #[test]
    fn a_command_from_arguments_is_one_that_kvbench_takes() {
        let args = json!({"blocks": [1000, 1_000_000], "k": [1, 16], "iters": 10, "backend": "host", "device": 0, "made_up": 3});
        let found = of(&run("alloc", &args, Value::Object(Map::new())));
        assert!(found.command.starts_with("kvbench alloc --blocks 1000,1000000 --k 1,16 --iters 10"), "{found:?}");
        assert_eq!(found.note.unwrap(), "not a flag of this kvbench: made_up 3");
        let words = found.command.split(' ').map(OsString::from);
        assert!(Cli::parse_args(words).is_ok());
    }

    #[test]
    fn words_that_a_shell_would_take_apart_are_quoted() {
        assert_eq!(quoted(&["a".into(), "b c".into(), "$(rm)".into(), String::new()]), "a 'b c' '$(rm)' ''");
    }

    #[test]
    fn where_results_went_is_left_out() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let kept = without_outputs(words("kvbench vmm --output a.json --quick --json --csv=x.csv --pages 4"));
        assert_eq!(kept.join(" "), "kvbench vmm --quick --pages 4");
    }

    #[test]
    fn secrets_stay_out() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let kept = without_secrets(words("x --api-key k --header A:b --max-tokens 64 --openai-api-key=k2"));
        assert_eq!(kept.join(" "), "x --api-key ... --header ... --max-tokens ... --openai-api-key=...");
    }
}
