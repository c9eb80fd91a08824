//! The questions: where their files are, and how a prompt is made of them.
//!
//! ```text
//!   Question: <q of a shot>\nAnswer: <a of a shot>\n\n      as many shots as asked for
//!   Question: <q>\nAnswer:
//! ```
//!
//! | protocol   | shots                    | scored                | what that means                                       |
//! |------------|--------------------------|-----------------------|-------------------------------------------------------|
//! | `vllm`     | first k of `train.jsonl` | first n of `test.jsonl` | no question is in its own prompt                     |
//! | `kvcached` | first k of `test.jsonl`  | first n of `test.jsonl` | the first k questions are asked with their answer in the prompt |
//!
//! Nothing is ever taken from anywhere but the files of the user: without them there is an error, never a sample.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Where the files come from.
const SOURCE: &str = "https://github.com/openai/grade-school-math (grade_school_math/data, MIT licence)";
/// The variable that names a folder with data sets.
pub(crate) const DATA_VARIABLE: &str = "KVBENCH_DATA";
/// A text is never longer than this in the data; a wrong path should not cost memory.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Which published procedure is followed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Shots from the training set, up to 256 tokens: vLLM's evaluation
    #[default]
    Vllm,
    /// Shots from the test set itself, up to 512 tokens: kvcached's bench_vllm.py, leak included
    Kvcached,
}

impl Protocol {
    /// Questions when nobody says how many.
    pub fn default_questions(self) -> usize {
        match self {
            Self::Vllm => 1319,
            Self::Kvcached => 100,
        }
    }

    /// Longest answer when nobody says how long.
    pub fn default_max_tokens(self) -> u32 {
        match self {
            Self::Vllm => 256,
            Self::Kvcached => 512,
        }
    }

    fn shots_file(self) -> &'static str {
        match self {
            Self::Vllm => "train.jsonl",
            Self::Kvcached => TEST_FILE,
        }
    }
}

const TEST_FILE: &str = "test.jsonl";

/// A question and its worked answer, which ends in `#### 42`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Question {
    /// What is asked.
    pub question: String,
    /// What is right.
    pub answer: String,
}

/// Why there are no questions.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// Nobody said where the files are.
    #[error(
        "GSM8K's {TEST_FILE} and train.jsonl are needed: get them from {SOURCE} and give their folder by --data, \
         or a folder with gsm8k/ in it by {DATA_VARIABLE}"
    )]
    NoData,
    /// A file that is not there or cannot be read.
    #[error("{} cannot be read; GSM8K's files are at {SOURCE}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Far more than the data set has.
    #[error("{} is larger than {} MiB and no file of GSM8K", path.display(), MAX_FILE_BYTES >> 20)]
    TooLarge {
        /// Which.
        path: PathBuf,
    },
    /// A line that is not what it should be.
    #[error("line {line} of {} is no object with \"question\" and \"answer\"", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What the reader says.
        #[source]
        source: serde_json::Error,
    },
    /// Fewer questions than asked for.
    #[error("{} has {found} questions and {wanted} are wanted: lower --num-questions or --num-shots", path.display())]
    TooFew {
        /// Which file.
        path: PathBuf,
        /// How many it has.
        found: usize,
        /// How many were asked for.
        wanted: usize,
    },
}

/// Prompts with their gold answers.
#[derive(Clone, Debug)]
pub struct Exam {
    shots: Vec<Question>,
    /// What is asked and scored, in the order of the file.
    pub questions: Vec<Question>,
}

impl Exam {
    /// Reads what `protocol` needs from `folder`, or from where `KVBENCH_DATA` says.
    ///
    /// # Errors
    /// [`DataError`], which says which file to get and where.
    pub fn read(protocol: Protocol, folder: Option<&Path>, questions: usize, shots: usize) -> Result<Self, DataError> {
        let folder = match folder {
            Some(folder) => folder.to_owned(),
            None => {
                env::var_os(DATA_VARIABLE).filter(|dir| !dir.is_empty()).map(PathBuf::from).ok_or(DataError::NoData)?
            }
        };
        // A folder of data sets or the folder of this one.
        let inner = folder.join("gsm8k");
        let folder = if inner.is_dir() { inner } else { folder };
        let shots = read_first(&folder.join(protocol.shots_file()), shots)?;
        Ok(Self { shots, questions: read_first(&folder.join(TEST_FILE), questions)? })
    }

    /// The prompt of question `index`.
    pub fn prompt(&self, index: usize) -> String {
        let shot = |shot: &Question| format!("Question: {}\nAnswer: {}\n\n", shot.question, shot.answer);
        let shots: String = self.shots.iter().map(shot).collect();
        format!("{shots}Question: {}\nAnswer:", self.questions[index].question)
    }
}

/// The first `count` questions of a file.
fn read_first(path: &Path, count: usize) -> Result<Vec<Question>, DataError> {
    let unreadable = |source| DataError::Unreadable { path: path.to_owned(), source };
    if fs::metadata(path).map_err(unreadable)?.len() > MAX_FILE_BYTES {
        return Err(DataError::TooLarge { path: path.to_owned() });
    }
    let text = fs::read_to_string(path).map_err(unreadable)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).take(count);
    let parse = |(index, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|source| DataError::Line { path: path.to_owned(), line: index + 1, source })
    };
    let questions: Vec<Question> = lines.map(parse).collect::<Result<_, _>>()?;
    if questions.len() < count {
        return Err(DataError::TooFew { path: path.to_owned(), found: questions.len(), wanted: count });
    }
    Ok(questions)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with `train` and `test` questions of our own.
    fn folder(train: usize, test: usize) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let lines = |name: &str, count: usize| -> String {
            let line = |n: usize| format!("{{\"question\": \"{name} {n}?\", \"answer\": \"so #### {n}\"}}\n");
            (0..count).map(line).collect()
        };
        fs::write(dir.path().join("train.jsonl"), lines("train", train)).unwrap();
        fs::write(dir.path().join(TEST_FILE), lines("test", test)).unwrap();
        dir
    }

    #[test]
    fn a_prompt_has_its_shots_and_ends_where_the_answer_begins() {
        let dir = folder(3, 4);
        let exam = Exam::read(Protocol::Vllm, Some(dir.path()), 4, 2).unwrap();
        assert_eq!(
            exam.prompt(3),
            "Question: train 0?\nAnswer: so #### 0\n\nQuestion: train 1?\nAnswer: so #### 1\n\nQuestion: test 3?\nAnswer:"
        );
    }

    #[test]
    fn the_kvcached_protocol_asks_questions_whose_answer_is_in_the_prompt_and_ours_does_not() {
        let dir = folder(5, 8);
        let leaks = |protocol| {
            let exam = Exam::read(protocol, Some(dir.path()), 8, 5).unwrap();
            let own = |index: usize| {
                let question = &exam.questions[index];
                format!("Question: {}\nAnswer: {}", question.question, question.answer)
            };
            (0..8).filter(|&index| exam.prompt(index).contains(&own(index))).collect::<Vec<_>>()
        };
        assert_eq!(leaks(Protocol::Kvcached), [0, 1, 2, 3, 4]);
        assert_eq!(leaks(Protocol::Vllm), [0usize; 0]);
    }

    #[test]
    fn errors_name_the_file_the_line_and_the_source() {
        let dir = folder(1, 2);
        let read = |questions, shots| Exam::read(Protocol::Vllm, Some(dir.path()), questions, shots).unwrap_err();
        assert!(matches!(read(3, 1), DataError::TooFew { found: 2, wanted: 3, .. }));
        fs::write(dir.path().join(TEST_FILE), "{\"question\": \"a\", \"answer\": \"b\"}\n{\"question\": 1}\n").unwrap();
        assert!(read(2, 1).to_string().starts_with("line 2 of "), "{}", read(2, 1));
        fs::remove_file(dir.path().join(TEST_FILE)).unwrap();
        let missing = read(1, 1).to_string();
        assert!(missing.contains("test.jsonl") && missing.contains("https://github.com/openai/"), "{missing}");
    }

    #[test]
    fn a_folder_of_data_sets_works_too() {
        let outer = tempfile::tempdir().unwrap();
        let inner = folder(1, 1);
        fs::create_dir(outer.path().join("gsm8k")).unwrap();
        for name in ["train.jsonl", TEST_FILE] {
            fs::copy(inner.path().join(name), outer.path().join("gsm8k").join(name)).unwrap();
        }
        assert_eq!(Exam::read(Protocol::Vllm, Some(outer.path()), 1, 1).unwrap().questions.len(), 1);
    }
}
