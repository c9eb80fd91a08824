//! One suite for every registered strategy, with real worker processes: killed, stopped, late, lying. A new strategy is in
//! it as soon as it is registered.
//!
//! | module | what |
//! | --- | --- |
//! | `answers` | the ordinary case: everybody's answer, in rank order; who is meant; refusals; long orders |
//! | `faults` | workers that are killed, stopped, restarted, missing |
//! | `lies` | workers that send what no worker sends |
//! | `endurance` | a thousand reconnects; a long loop that leaks nothing |
//! | `server` | the worker's side, held to its own promises |

#[path = "../support/mod.rs"]
mod support;

mod server;

use std::path::Path;
use std::process::Command;

use tidekv_ipc::broadcast::{STRATEGIES, strategy};

/// The processes that the tests start.
#[test]
fn worker() {
    let Some((words, dir)) = support::role() else { return };
    match words[0].as_str() {
        "serve" => support::serve(&dir, &words),
        "loop" => endurance::looping(&dir, &words),
        "race" => server::racing(&dir),
        "fork" => server::forking(&dir),
        other => panic!("no role {other}"),
    }
}

/// A test of each function, for every strategy that is registered.
macro_rules! suite {
    ($($file:ident::{$($test:ident),* $(,)?}),* $(,)?) => {
        $(mod $file;)*

        /// Each of them is played to each strategy.
        mod every_strategy {
            $($(
                #[test]
                fn $test() {
                    for entry in tidekv_ipc::broadcast::STRATEGIES {
                        eprintln!("strategy {}", entry.name);
                        crate::$file::$test(entry);
                    }
                }
            )*)*
        }
    };
}

suite! {
    answers::{
        everybody_answers, only_those_who_are_meant, a_refusal_names_its_rank, long_orders_arrive_whole,
        a_stage_has_its_own_workers, too_many_pages_are_sent_to_nobody,
    },
    faults::{
        a_worker_killed_before_the_order, a_worker_killed_while_it_works, a_worker_killed_after_it,
        a_stopped_worker_times_out_alone, a_stopped_worker_cannot_fill_us_up, a_worker_comes_back,
        missing_workers_are_named, nobody_waits_longer_than_the_timeout,
    },
    lies::{
        late_and_double_answers_are_dropped, rubbish_ends_the_lane, half_an_answer_is_no_answer,
        an_answer_in_pieces_is_one, a_last_word_is_heard, late_answers_without_end_keep_nobody,
    },
    endurance::{a_thousand_reconnects, a_long_loop_leaks_nothing},
}

#[test]
fn the_registry_names_each_strategy_once_and_its_file() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/broadcast");
    for entry in STRATEGIES {
        assert_eq!(STRATEGIES.iter().filter(|other| other.name == entry.name).count(), 1, "{}", entry.name);
        assert!(source.join(entry.file).is_file(), "{}", entry.file);
        assert!(strategy(entry.name).is_ok_and(|found| found.file == entry.file) && !entry.summary.is_empty());
    }
    for kvcacheds in ["seq", "thread", "async"] {
        assert!(strategy(kvcacheds).is_ok());
    }
}

/// `cargo fmt` does not see modules that a macro declares.
#[test]
fn strategy_files_are_formatted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = STRATEGIES.iter().map(|entry| root.join("src/broadcast").join(entry.file));
    let mut rustfmt = Command::new("rustfmt");
    rustfmt.args(["--check", "--edition", "2024", "--config-path"]).arg(root.join("../..")).args(files);
    match rustfmt.output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout)),
        Err(_) => eprintln!("SKIPPED: there is no rustfmt here"),
    }
}

#[test]
fn an_unknown_name_says_what_there_is() {
    let error = strategy("telepathy").expect_err("not registered").to_string();
    let names: Vec<&str> = STRATEGIES.iter().map(|entry| entry.name).collect();
    for word in ["'telepathy'", &names.join(", "), "docs/adding-a-strategy.md"] {
        assert!(error.contains(word), "{error}");
    }
}
