//! `kvbench gsm8k` against a server that answers k of n questions correctly.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;
use tidekv_bench::load::mock::{Mock, MockRequest, Script};

use crate::support::KvBench;

/// Gold answers of every kind that the data have or could have.
const GOLD: [&str; 10] = ["72", "10", "-10", "-3", "2,280", "1,000,000", "12.5", "0.25", "5", "18"];

/// A folder of questions whose n-th has the n-th gold answer.
fn data() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let lines = |name: &str, gold: &[&str]| -> String {
        let line = |(n, gold): (usize, &&str)| {
            format!("{}\n", json!({"question": format!("{name} {n}?"), "answer": format!("Because.\n#### {gold}")}))
        };
        gold.iter().enumerate().map(line).collect()
    };
    fs::write(dir.path().join("test.jsonl"), lines("test", &GOLD)).unwrap();
    fs::write(dir.path().join("train.jsonl"), lines("train", &["1", "2", "3", "4", "5"])).unwrap();
    dir
}

/// Which question a prompt ends with.
fn asked(prompt: &str) -> usize {
    let last = prompt.rsplit("Question: ").next().unwrap();
    assert!(last.ends_with("?\nAnswer:"), "{prompt}");
    last.trim_end_matches("?\nAnswer:").rsplit(' ').next().unwrap().parse().unwrap()
}

/// Right about the first `right` questions, wrong about the others, silent about the last.
fn server(right: usize) -> Mock {
    let answer = move |request: &MockRequest| {
        assert_eq!(request.body["temperature"], json!(0.0));
        assert_eq!(request.body["stop"], json!(["Question", "Assistant:", "<|separator|>"]));
        let question = asked(&request.prompt);
        match question {
            _ if question == GOLD.len() - 1 => Script::saying(" I would rather not say."),
            _ if question < right => Script::saying(&format!(" We compute. The answer is {}.", GOLD[question])),
            _ => Script::saying(" The answer is 987654321."),
        }
    };
    Mock::start(answer).unwrap()
}

fn exam(mock: &Mock, dir: &TempDir, more: &[&str]) -> Value {
    let url = mock.base_url().to_string();
    let data = dir.path().to_str().unwrap();
    let args = ["--base-url", &url, "--model", "mock", "--data", data, "--num-questions", "10", "--parallel", "3"];
    KvBench::new("gsm8k").args(&args).args(more).json()
}

#[test]
fn k_of_n_right_answers_are_k_of_n_with_signs_commas_and_decimals() {
    let dir = data();
    for right in [0, 4, 9] {
        let mock = server(right);
        let result = exam(&mock, &dir, &[]);
        let summary = &result["summary"];
        #[expect(clippy::cast_precision_loss, reason = "below ten")]
        let share = right as f64 / 10.0;
        assert_eq!(summary["accuracy"].as_f64(), Some(share), "{summary:#}");
        assert_eq!(summary["numeric"]["accuracy"].as_f64(), Some(share));
        assert_eq!(summary["invalid_rate"].as_f64(), Some(0.1), "the one that says no number");
        let interval = summary["accuracy_ci"].as_array().unwrap();
        assert!(interval[0].as_f64().unwrap() <= share && share <= interval[1].as_f64().unwrap());
        assert!(interval[1].as_f64().unwrap() - interval[0].as_f64().unwrap() > 0.25, "ten questions say little");
        assert_eq!(mock.log().len(), 10);
    }
}

#[test]
fn the_protocol_of_kvcached_puts_answers_into_prompts_and_says_so() {
    let dir = data();
    let leaks = |mock: &Mock| {
        let has_own_answer = |log: &tidekv_bench::load::mock::MockLog| {
            let question = asked(&log.prompt);
            log.prompt.contains(&format!("Question: test {question}?\nAnswer: Because.\n#### {}", GOLD[question]))
        };
        mock.log().iter().filter(|log| has_own_answer(log)).count()
    };
    let mock = server(5);
    let result = exam(&mock, &dir, &["--protocol", "kvcached", "--num-shots", "5"]);
    assert_eq!(leaks(&mock), 5);
    assert_eq!(result["summary"]["leaked_questions"].as_f64(), Some(5.0));
    assert_eq!(result["summary"]["accuracy"].as_f64(), Some(0.5), "all of it from questions that were given away");
    assert_eq!(result["summary"]["unleaked"]["accuracy"].as_f64(), Some(0.0));

    let mock = server(5);
    let result = exam(&mock, &dir, &["--num-shots", "5"]);
    assert_eq!(leaks(&mock), 0);
    assert_eq!(result["summary"].get("leaked_questions"), None);
}

#[test]
fn without_data_there_is_an_error_and_never_a_sample() {
    let refused = |args: &[&str], part: &str| KvBench::new("gsm8k").args(args).without("KVBENCH_DATA").refused(part);
    refused(&[], "test.jsonl");
    refused(&[], "https://github.com/openai/grade-school-math");
    refused(&["--data", "/nonexistent"], "/nonexistent/train.jsonl");
}

#[test]
fn an_answer_that_never_comes_is_wrong_and_a_server_that_is_not_there_an_error() {
    let dir = data();
    let answer = |request: &MockRequest| match asked(&request.prompt) {
        0 => Script::error(500, "out of patience"),
        question => Script::saying(GOLD[question]),
    };
    let mock = Mock::start(answer).unwrap();
    let result = exam(&mock, &dir, &[]);
    assert_eq!(result["summary"]["accuracy"].as_f64(), Some(0.9));
    assert_eq!(result["summary"]["unanswered"].as_f64(), Some(1.0));
    drop(mock);
    let data = dir.path().to_str().unwrap();
    KvBench::new("gsm8k")
        .args(&["--port", "1", "--data", data, "--num-questions", "1"])
        .refused("is the server running there?");
}

#[test]
fn the_real_questions_are_read_where_they_are() {
    let Some(data) = std::env::var_os("KVBENCH_DATA") else {
        eprintln!("SKIPPED: the_real_questions_are_read_where_they_are: KVBENCH_DATA names no folder with gsm8k/");
        return;
    };
    let exam = tidekv_bench::gsm8k::data::Exam::read(Default::default(), Some(data.as_ref()), 1319, 5).unwrap();
    let negative = [489, 1113]
        .map(|index| tidekv_bench::gsm8k::score::last_number(&exam.questions[index].answer).unwrap().to_string());
    assert_eq!(negative, ["-10", "-3"]);
}
