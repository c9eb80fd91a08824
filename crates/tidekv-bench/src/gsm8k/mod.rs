//! `kvbench gsm8k`: how many of the grade-school problems does a server solve?
//!
//! ```text
//!   test.jsonl, train.jsonl ── data ──> prompts ── a server, greedy ──> texts ── score ──> k of n, Wilson's interval
//! ```
//!
//! Which questions, which shots and what counts as right follow a published protocol ([`data`], [`mod@score`]). An accuracy says
//! little without its interval: at n = 100 and 70 % it is 9 points to either side, so kvcached's default cannot show a loss of
//! five. Whether elastic memory changes answers is a different question, and `kvbench accuracy` answers it.
//!
//! | figure of `summary`                  | meaning                                                                    |
//! |--------------------------------------|----------------------------------------------------------------------------|
//! | `accuracy`, `accuracy_ci`            | share that is right by the protocol, with its 95 % interval                 |
//! | `invalid_rate`                       | share without any number                                                   |
//! | `numeric.accuracy`, `.accuracy_ci`   | the same with signs and decimals read                                      |
//! | `leaked_questions`, `unleaked.*`     | `kvcached` alone: questions with their answer in the prompt, and the accuracy of the others |
//! | `latency`, `questions_per_second`, `tokens_per_second`, `total_output_tokens` | as vLLM's evaluation reports them |

pub mod data;
mod report;
pub mod score;

use std::num::NonZero;
use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Serialize;
use tidekv_cli::exit::Outcome;

use crate::host::HostInfo;
use crate::load::{Api, BaseUrl, Endpoint, Item};
use crate::output::OutputArgs;
use crate::result::BenchResult;
use crate::servers::session::Session;
use crate::servers::sides::served_model;
use crate::servers::texts::{Asking, ask};
use data::{Exam, Protocol};
use score::{Score, score};

/// What ends an answer in every protocol.
pub(crate) const STOP: [&str; 3] = ["Question", "Assistant:", "<|separator|>"];
/// Questions of `--quick`.
const QUICK_QUESTIONS: usize = 20;

/// Arguments of `kvbench gsm8k`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Gsm8kArgs {
    /// The model's name [default: what the server lists first]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,

    /// Where the server is
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,

    /// Where it listens
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,

    /// The same as one URL
    #[arg(long, value_name = "URL", conflicts_with_all = ["host", "port"])]
    pub base_url: Option<BaseUrl>,

    /// Which published procedure
    #[arg(long, value_enum, default_value_t)]
    pub protocol: Protocol,

    /// Questions [default: vllm 1319, which is all; kvcached 100; with --quick 20]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub num_questions: Option<u32>,

    /// Worked examples before each question
    #[arg(long, value_name = "K", default_value_t = 5)]
    pub num_shots: u32,

    /// Questions under way at a time
    #[arg(long, value_name = "N", default_value_t = NonZero::new(32).expect("32 is not 0"))]
    pub parallel: NonZero<usize>,

    /// Longest answer, in tokens [default: vllm 256, kvcached 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,

    /// Folder with test.jsonl and train.jsonl [default: $KVBENCH_DATA/gsm8k]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub data: Option<PathBuf>,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench gsm8k --port 12346 --data ./grade-school-math          # all 1319 questions, shots from the training set
  kvbench gsm8k --model Qwen/Qwen2.5-Math-1.5B --port 12346 --num-questions 100 --num-shots 5 --parallel 8
  kvbench gsm8k --protocol kvcached --port 12346                 # as bench_vllm.py does it, leak included

The questions are not part of kvbench: get them from https://github.com/openai/grade-school-math.
Exit status: 0 measured, 2 error: no data, no server, no answer, 130 interrupted (what was answered is written).";

/// What is asked, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    base_url: String,
    model: String,
    protocol: Protocol,
    num_questions: usize,
    num_shots: usize,
    parallel: usize,
    max_tokens: u32,
}

/// Measures, prints and keeps the result.
pub fn run(args: &Gsm8kArgs) -> anyhow::Result<Outcome> {
    let default_questions = if args.output.quick { QUICK_QUESTIONS } else { args.protocol.default_questions() };
    let num_questions = args.num_questions.map_or(default_questions, |questions| questions as usize);
    // What is missing is said before a server is asked for.
    let exam = Exam::read(args.protocol, args.data.as_deref(), num_questions, args.num_shots as usize)?;
    let output = args.output.open()?;
    let session = Session::begin()?;
    let url = args.base_url.clone().unwrap_or_else(|| BaseUrl::new(&args.host, args.port));
    let model = args.model.clone().map_or_else(|| served_model(&session, &url), Ok)?;
    let plan = Plan {
        base_url: url.to_string(),
        model: model.clone(),
        protocol: args.protocol,
        num_questions,
        num_shots: args.num_shots as usize,
        parallel: args.parallel.get(),
        max_tokens: args.max_tokens.unwrap_or(args.protocol.default_max_tokens()),
    };
    let mut result = BenchResult::new("gsm8k", &plan, HostInfo::current())?;
    let items = (0..num_questions).map(|index| Item::text(exam.prompt(index))).collect();
    let asking = Asking {
        max_tokens: plan.max_tokens,
        stop: STOP.map(str::to_owned).to_vec(),
        ignore_eos: false,
        parallel: args.parallel,
        cache_salt: None,
    };
    let answers = ask(&session, Endpoint::new(url, Api::Completions, model), items, &asking)?;
    let scores: Vec<Score> = exam
        .questions
        .iter()
        .zip(&answers.answers)
        // An answer that never came is no number: wrong and invalid, never left out.
        .map(|(question, answer)| score(answer.text.as_deref().unwrap_or(""), &question.answer))
        .collect();
    let marks = report::Marks::of(args.protocol, plan.num_shots, &scores, &answers);
    marks.fill(&mut result);
    marks.fill_known_keys(&mut result, plan.num_shots, plan.max_tokens, plan.parallel);
    result.set_partial(session.is_interrupted());
    output.emit(&result, &marks.table(&plan.model))?;
    Ok(session.interrupt().outcome(Outcome::Done))
}
