//! `kvbench serve --config bench-config.yaml`: every model of kvcached's file at every rate of it, one run each.
//!
//! The servers are there: `models[].port` says where, on `--host`. What the flags say goes before what the file says. Each run has
//! files of its own: `--output out.json` becomes `out-llama-7b-8.json` for the model llama-7b at 8 requests a second.

use std::path::{Path, PathBuf};

use tidekv_cli::exit::Outcome;

use super::ServeArgs;
use crate::bench_config::{BenchConfig, ModelEntry};

/// The runs of a file, in its order.
pub(super) fn runs(args: &ServeArgs, path: &Path) -> anyhow::Result<Vec<ServeArgs>> {
    let config = BenchConfig::read(path)?;
    let benchmark = &config.benchmark;
    let rates = match args.traffic.request_rate {
        rate if rate.is_finite() => vec![rate],
        _ => benchmark.request_rates.clone(),
    };
    // Without models the flags say where the server is.
    let models: Vec<Option<&ModelEntry>> = match &config.models[..] {
        [] => vec![None],
        models => models.iter().map(Some).collect(),
    };
    let is_one = models.len() * rates.len() == 1;
    let mut runs = Vec::new();
    for model in models {
        for &rate in &rates {
            let mut run = args.clone();
            run.config = None;
            run.traffic.request_rate = rate;
            if let Some(model) = model.filter(|model| model.port > 0 && args.base_url.is_none()) {
                run.port = args.port.or(Some(model.port));
            }
            run.keep.label = args.keep.label.clone().or_else(|| model.map(|model| model.name.clone()));
            // A first look goes before the file's number.
            let file_prompts = (!args.output.quick).then_some(benchmark.num_requests as usize);
            run.data.num_prompts = args.data.num_prompts.or(file_prompts);
            run.data.random_input_len = args.data.random_input_len.or(Some(benchmark.input_len));
            run.data.random_output_len = args.data.random_output_len.or(Some(benchmark.output_len));
            if !is_one {
                let name = model.map_or("server", |model| &model.name);
                let of_run = |file: &Path| named(file, name, rate);
                run.output.output = args.output.output.as_deref().map(of_run);
                run.keep.csv = args.keep.csv.as_deref().map(of_run);
                let filename = args.keep.result_filename.as_deref().map(|file| of_run(Path::new(file)));
                run.keep.result_filename = filename.map(|file| file.to_string_lossy().into_owned());
            }
            runs.push(run);
        }
    }
    Ok(runs)
}

/// What several runs come to: an interruption, else a failure, else all is well.
pub(super) fn worst(outcomes: &[Outcome]) -> Outcome {
    let worst = |wanted: fn(&Outcome) -> bool| outcomes.iter().copied().find(wanted);
    worst(|outcome| matches!(outcome, Outcome::Code(_)))
        .or_else(|| worst(|outcome| *outcome == Outcome::Negative))
        .unwrap_or(Outcome::Done)
}

/// `out.json` -> `out-NAME-RATE.json`; what is no part of a file's name becomes a dash.
fn named(file: &Path, name: &str, rate: f64) -> PathBuf {
    let harmless = |letter: char| if letter.is_alphanumeric() || "._-".contains(letter) { letter } else { '-' };
    let name: String = name.chars().map(harmless).collect();
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let extension = file.extension().map_or_else(String::new, |extension| format!(".{}", extension.to_string_lossy()));
    file.with_file_name(format!("{stem}-{name}-{rate}{extension}"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn planned(file: &str, flags: &[&str]) -> Vec<ServeArgs> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bench-config.yaml");
        fs::write(&path, file).unwrap();
        let words = ["kvbench", "serve", "--config", path.to_str().unwrap()];
        let Command::Serve(args) = Cli::try_parse_from(words.iter().chain(flags)).unwrap().command else {
            panic!("serve")
        };
        runs(&args, &path).unwrap()
    }

    const FILE: &str = "models:\n  - {name: llama 7b, path: x, port: 8001}\n  - {name: qwen, path: y, port: 8002}\n\
                        benchmark: {request_rates: [1, 2.5]}\n";

    #[test]
    fn every_model_at_every_rate_with_the_guides_defaults() {
        let runs = planned(FILE, &["--output", "/x/out.json"]);
        let brief: Vec<_> = runs
            .iter()
            .map(|run| (run.port, run.traffic.request_rate, run.output.output.as_ref().unwrap().to_str().unwrap()))
            .collect();
        assert_eq!(
            brief,
            [
                (Some(8001), 1.0, "/x/out-llama-7b-1.json"),
                (Some(8001), 2.5, "/x/out-llama-7b-2.5.json"),
                (Some(8002), 1.0, "/x/out-qwen-1.json"),
                (Some(8002), 2.5, "/x/out-qwen-2.5.json"),
            ]
        );
        let files = ["--csv", "x.csv", "--save-result", "--result-filename", "kept.json"];
        let last = planned(FILE, &files).pop().unwrap().keep;
        assert_eq!(last.csv.as_deref(), Some(Path::new("x-qwen-2.5.csv")));
        assert_eq!(last.result_filename.as_deref(), Some("kept-qwen-2.5.json"));
        let data = &runs[0].data;
        assert_eq!(
            (data.num_prompts, data.random_input_len, data.random_output_len),
            (Some(1000), Some(512), Some(128))
        );
    }

    #[test]
    fn flags_go_before_the_file() {
        let runs = planned(FILE, &["--request-rate", "7", "--num-prompts", "3", "--port", "9"]);
        let brief: Vec<_> = runs.iter().map(|run| (run.port, run.traffic.request_rate, run.data.num_prompts)).collect();
        assert_eq!(brief, [(Some(9), 7.0, Some(3)), (Some(9), 7.0, Some(3))]);
        let one = planned("{}", &["--request-rate", "7", "--output", "out.json"]);
        assert_eq!((one.len(), one[0].output.output.as_deref()), (1, Some(Path::new("out.json"))));
    }

    #[test]
    fn an_interruption_outweighs_a_failure() {
        assert_eq!(worst(&[Outcome::Done, Outcome::Negative]), Outcome::Negative);
        assert_eq!(worst(&[Outcome::Negative, Outcome::Code(130)]), Outcome::Code(130));
        assert_eq!(worst(&[]), Outcome::Done);
    }
}
