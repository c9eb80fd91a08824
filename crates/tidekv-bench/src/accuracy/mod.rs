//! `kvbench accuracy`: does elastic memory change a single token?
//!
//! ```text
//!   the same prompts, greedy:   A      A again      B          A static, B elastic; or any two servers
//!                               └─ equal? ─┘        │
//!                               └────── equal? ─────┘
//! ```
//!
//! Engines are not always equal to themselves: which requests share a batch moves the last bits of a sum. So every prompt is
//! put to A twice, and the question is whether B differs from A more often than A does. McNemar's test asks that of the
//! prompts on which the two comparisons disagree; with questions that have a right answer (`--data`) it asks as well whether
//! one side is right more often.
//!
//! | figure of `summary`                          | meaning                                                            |
//! |----------------------------------------------|--------------------------------------------------------------------|
//! | `text_match`, `text_match_ci`                | share of prompts with the same text from A and B                    |
//! | `token_match`                                | share of A's tokens up to the first that B has otherwise            |
//! | `self_match`                                 | share of prompts with the same text from A twice                    |
//! | `mcnemar.{only_a,only_b,p_value}`            | A repeats itself and B differs; the other way round; chance          |
//! | `correct.{a,b}`, `correct.mcnemar.*`         | with `--data`: shares that are right, and the same test on them      |
//! | `verdict`                                    | `identical`, `differs`, `no more than A from itself`, `underpowered` |

mod judge;
mod report;
mod tokens;

use std::num::NonZero;
use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Serialize;
use tidekv_cli::exit::Outcome;

use crate::bench_config::BenchConfig;
use crate::gsm8k::STOP;
use crate::gsm8k::data::{Exam, Protocol};
use crate::gsm8k::score::score;
use crate::load::data::{Form, Made, Segment, Vocabulary, mixed};
use crate::load::{Endpoint, Item, Prompt};
use crate::output::OutputArgs;
use crate::result::BenchResult;
use crate::servers::session::Session;
use crate::servers::sides::{Arm, SideArgs, Sides};
use crate::servers::texts::{Asking, TextAnswers, ask};

/// Prompts of a run, default and with `--quick`.
const PROMPTS: (u32, u32) = (256, 24);
const SHOTS: usize = 5;

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
  kvbench accuracy --a-url http://gpu1:8000 --b-url http://gpu1:8001
  kvbench accuracy --a-cmd 'vllm serve m --port {port}' --b-cmd 'ENABLE_KVCACHED=true vllm serve m --port {port}'

Exit status: 0 identical, or no more different than A from itself; 1 different, or too few prompts to tell; 2 error; 130
interrupted (prompts that both sides have answered are compared and written).";

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
    seed: u64,
}

/// The three rounds.
#[derive(Debug)]
struct Rounds {
    a: TextAnswers,
    again: TextAnswers,
    b: TextAnswers,
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
    };
    let progress = output.progress(3);
    let mut arms = sides.arms(&session);
    let mut round = |arm: Arm, what: &'static str| {
        progress.now(what);
        let endpoint = arms.endpoint(arm)?;
        let answers = ask(&session, endpoint.clone(), items(&plan, exam.as_ref()), &asking)?;
        progress.step();
        anyhow::Ok((answers, endpoint))
    };
    let mut rounds = Vec::new();
    for (arm, what) in [(Arm::A, "A"), (Arm::A, "A again"), (Arm::B, "B")] {
        match round(arm, what) {
            Err(_) if session.is_interrupted() => break,
            outcome => rounds.push(outcome?),
        }
    }
    drop(progress);
    let Some((rounds, endpoint)) = Rounds::of(rounds) else {
        // Not one prompt has been put to both sides: there is nothing to write.
        return Ok(session.interrupt().outcome(Outcome::Done));
    };
    // While a server is there that can split texts into tokens.
    let token_match = tokens::matching(&session, &endpoint.base_url, &rounds.a, &rounds.b);
    drop(arms);
    let correct = exam.as_ref().map(|exam| {
        [&rounds.a, &rounds.b].map(|answers| {
            let of = |(question, answer): (&crate::gsm8k::data::Question, &crate::servers::texts::TextAnswer)| {
                score(answer.text.as_deref().unwrap_or(""), &question.answer).is_right
            };
            exam.questions.iter().zip(&answers.answers).map(of).collect::<Vec<bool>>()
        })
    });
    let judged = judge::judge(&rounds, correct.as_ref());
    report::fill(&mut result, &judged, token_match);
    result.set_partial(session.is_interrupted());
    output.emit(&result, &report::table(&plan, &judged, token_match))?;
    Ok(session.interrupt().outcome(judged.verdict.outcome()))
}

impl Rounds {
    /// Of the prompts that were answered in all three; `None` where there are none. With the last server that was asked.
    fn of(rounds: Vec<(TextAnswers, Endpoint)>) -> Option<(Self, Endpoint)> {
        let common = rounds.iter().map(|(round, _)| round.answers.len()).min().filter(|&common| common > 0)?;
        let [mut a, mut again, mut b] = <[_; 3]>::try_from(rounds).ok()?;
        for (round, _) in [&mut a, &mut again, &mut b] {
            round.answers.truncate(common);
        }
        Some((Self { a: a.0, again: again.0, b: b.0 }, b.1))
    }
}

/// The prompts, the same in every round.
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
