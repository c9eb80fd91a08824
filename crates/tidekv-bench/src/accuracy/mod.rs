//! `kvbench accuracy`: does elastic memory change a single token?
//!
//! ```text
//!   the same prompts, greedy       pass 1      2    3    4    5        2 to 5 each in an order of its own
//!
//!     A static                      a ─┐      a    a    a    a         or any two servers
//!     B elastic                     b ─┘      b    b    b    b
//!                                   │         └───────┬──────┘
//!                    all the same: identical      is a pass of A less like one of B than two passes of A, or of B,
//!                    and nothing more is asked    are like each other?
//! ```
//!
//! Engines are not always equal to themselves: which requests share a batch moves the last bits of a sum, and with them the
//! choice at a near tie. How a pass begins decides who meets whom in all of it, so its texts are no independent witnesses: a
//! pass counts once ([`relabel`](crate::statistics::relabel)). Each has a `cache_salt` of its own, since prompts that were
//! cached would keep what the company of an earlier pass made of them.
//!
//! | figure of `summary`                  | meaning                                                                    |
//! |--------------------------------------|----------------------------------------------------------------------------|
//! | `text_match`, `text_match_ci`        | share of prompts with the same text from A and B in the first pass          |
//! | `token_match`                        | share of A's tokens there up to the first that B has otherwise              |
//! | `self_match`, `cross_match`          | share with the same text in two later passes of one side; in one of each    |
//! | `excess`, `p_value`                  | the former less the latter; chance that sides which are one look like this  |
//! | `seen_from`                          | the least `excess` that these passes would have proved                      |
//! | `correct.{a,b}`, `correct.mcnemar.*` | with `--data`: shares that are right in the first pass; whether they differ |
//! | `verdict`                            | `identical`, `differs`, `no more than from themselves`, `underpowered`      |

mod judge;
mod passes;
mod report;
mod tokens;

use std::num::NonZero;
use std::path::PathBuf;

use clap::{Args, ValueHint};
use passes::{Passes, turns};
use serde::Serialize;
use tidekv_cli::exit::Outcome;

use crate::bench_config::BenchConfig;
use crate::gsm8k::STOP;
use crate::gsm8k::data::{Exam, Protocol, Question};
use crate::gsm8k::score::score;
use crate::load::data::{Form, Made, Segment, Vocabulary, mixed};
use crate::load::{Item, Prompt};
use crate::output::OutputArgs;
use crate::result::BenchResult;
use crate::servers::session::Session;
use crate::servers::sides::{Arm, SideArgs, Sides};
use crate::servers::texts::{Asking, TextAnswer};
use crate::statistics::MOST_RUNS;

/// Prompts of a run, default and with `--quick`.
const PROMPTS: (u32, u32) = (256, 24);
const SHOTS: usize = 5;
/// Passes of a side: one for whether all is the same, and as many as it takes to prove a difference.
const PASSES: u8 = 5;

/// Arguments of `kvbench accuracy`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct AccuracyArgs {
    /// What is compared.
    #[command(flatten)]
    pub sides: SideArgs,

    /// Prompts [default: 256, with --quick 24]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub num_prompts: Option<u32>,

    /// Tokens of a prompt, without --data
    #[arg(long, value_name = "N", default_value_t = 96, value_parser = clap::value_parser!(u32).range(1..))]
    pub input_len: u32,

    /// Longest answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub output_len: u32,

    /// Questions of GSM8K from this folder instead of random prompts, scored
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub data: Option<PathBuf>,

    /// Requests under way at a time
    #[arg(long, value_name = "N", default_value_t = NonZero::new(8).expect("8 is not 0"))]
    pub parallel: NonZero<usize>,

    /// Passes of each side, where the first ones are not identical; fewer than 5 prove no difference
    #[arg(long, value_name = "N", default_value_t = PASSES, value_parser = clap::value_parser!(u8).range(1..=MOST_RUNS as i64 + 1))]
    pub passes: u8,

    /// Seed of the prompts
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench accuracy                                     # elastic against static kvserve, 256 random prompts
  kvbench accuracy --model Qwen/Qwen3-0.6B --data ./grade-school-math --num-prompts 100
  kvbench accuracy --backend cuda --model synthetic:llama-8b --parallel 1   # nobody shares a batch: identical, or a bug
  kvbench accuracy --a-url http://gpu1:8000 --b-url http://gpu1:8001
  kvbench accuracy --a-cmd 'vllm serve m --port {port}' --b-cmd 'ENABLE_KVCACHED=true vllm serve m --port {port}'

Each pass has a cache_salt of its own (vLLM, SGLang and kvserve honour it): with a server that ignores it, turn prefix caching off.

Exit status: 0 identical, or no more different than either from itself; 1 different, or too few prompts or passes to tell;
2 error; 130 interrupted (prompts and passes that both sides have answered are compared and written).";

/// What is asked, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    a: String,
    b: String,
    names: [&'static str; 2],
    num_prompts: usize,
    input_len: u32,
    output_len: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<PathBuf>,
    parallel: usize,
    passes: u8,
    seed: u64,
}

/// Measures, prints and keeps the result.
pub fn run(args: &AccuracyArgs) -> anyhow::Result<Outcome> {
    let config = args.sides.config.as_deref().map(BenchConfig::read).transpose()?;
    let usual = if args.output.quick { PROMPTS.1 } else { PROMPTS.0 };
    let num_prompts = args.num_prompts.unwrap_or(usual) as usize;
    let exam =
        args.data.as_deref().map(|data| Exam::read(Protocol::Vllm, Some(data), num_prompts, SHOTS)).transpose()?;
    let sides = Sides::of(&args.sides, config.as_ref())?;
    let plan = Plan {
        a: sides.description(Arm::A),
        b: sides.description(Arm::B),
        names: sides.names,
        num_prompts,
        input_len: args.input_len,
        output_len: args.output_len,
        data: args.data.clone(),
        parallel: args.parallel.get(),
        passes: args.passes,
        seed: args.seed,
    };
    let output = args.output.open()?;
    let mut result = BenchResult::new("accuracy", &plan, sides.host())?;
    let session = Session::begin()?;
    let asking = Asking {
        max_tokens: plan.output_len,
        stop: exam.as_ref().map(|_| STOP.map(str::to_owned).to_vec()).unwrap_or_default(),
        ignore_eos: exam.is_none(),
        parallel: args.parallel,
        cache_salt: None,
    };
    let progress = output.progress(2 * u64::from(plan.passes));
    let mut arms = sides.arms(&session);
    let mut passes = Passes::default();
    let mut asked = None;
    for (arm, number) in turns(plan.passes, sides.both_up) {
        progress.now(plan.names[arm.index()]);
        let endpoint = arms.endpoint(arm);
        let pass = endpoint.and_then(|endpoint| {
            asked = Some(endpoint.clone());
            passes::ask_once(&session, endpoint, items(&plan, exam.as_ref()), &asking, (arm, number, plan.seed))
        });
        match pass {
            Err(_) if session.is_interrupted() => break,
            pass => passes.add(arm, pass?),
        }
        progress.step();
        if session.is_interrupted() || passes.are_first_identical() {
            break;
        }
    }
    drop(progress);
    let (Some(first), Some(endpoint)) = (passes.first(), asked) else {
        // Not one prompt has been put to both sides: there is nothing to write.
        return Ok(session.interrupt().outcome(Outcome::Done));
    };
    // While a server is there that can split texts into tokens.
    let token_match = tokens::matching(&session, &endpoint.base_url, first[0], first[1]);
    drop(arms);
    let correct = exam.as_ref().map(|exam| {
        first.map(|answers| {
            let of = |(question, answer): (&Question, &TextAnswer)| {
                score(answer.text.as_deref().unwrap_or(""), &question.answer).is_right
            };
            exam.questions.iter().zip(answers).map(of).collect::<Vec<bool>>()
        })
    });
    let judged = judge::judge(&passes, correct.as_ref());
    report::fill(&mut result, &judged, token_match);
    result.set_partial(session.is_interrupted());
    output.emit(&result, &report::table(&plan, &judged, token_match))?;
    Ok(session.interrupt().outcome(judged.verdict.outcome()))
}

/// The prompts, the same in every pass.
fn items(plan: &Plan, exam: Option<&Exam>) -> Vec<Item> {
    let random = |index: usize| {
        let seed = mixed(plan.seed, u64::try_from(index).unwrap_or(u64::MAX));
        let segments = vec![Segment { seed, tokens: plan.input_len }];
        let made = Made { segments, form: Form::Tokens, vocabulary: Vocabulary::default() };
        Item { prompt: Prompt::Made(made), input_tokens: Some(plan.input_len), output_tokens: None, at: None }
    };
    let item = |index: usize| exam.map_or_else(|| random(index), |exam| Item::text(exam.prompt(index)));
    (0..plan.num_prompts).map(item).collect()
}
