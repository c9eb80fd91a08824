//! Which number an answer names, and whether it is the right one.
//!
//! ```text
//!   text                     words (vLLM, SGLang, kvcached)     numbers
//!   "... so 5 + 7 = 12."     12                                 12
//!   "$1,234"                 1234                               1234
//!   "it loses 10: -10"       10     the sign is lost            -10
//!   "$12.50"                 50     the point is lost           12.5
//!   "12.05"                  05 -> no number at all             12.05
//!   "I do not know"          no number                          no number
//! ```
//!
//! The left column is what published figures were scored with: the last run of digits once commas are gone, read as Python
//! reads an integer. The right one reads the last number as a person does. Both are reported, because a model that gives
//! the wrong sign is right in the one and wrong in the other.

use std::fmt;

/// A number, compared by value: `12.50` is `12.5`. Kept as digits, so nothing is rounded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Number {
    is_negative: bool,
    whole: String,
    fraction: String,
}

impl Number {
    fn new(is_negative: bool, whole: &str, fraction: &str) -> Self {
        let whole = whole.trim_start_matches('0').to_owned();
        let fraction = fraction.trim_end_matches('0').to_owned();
        let is_zero = whole.is_empty() && fraction.is_empty();
        Self { is_negative: is_negative && !is_zero, whole, fraction }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.is_negative { "-" } else { "" };
        let whole = if self.whole.is_empty() { "0" } else { &self.whole };
        let point = if self.fraction.is_empty() { "" } else { "." };
        write!(f, "{sign}{whole}{point}{}", self.fraction)
    }
}

/// The last run of digits, as the common protocol has it. `None` is what it calls invalid: no digits, or digits that
/// Python does not take for an integer (`05`).
pub fn last_digits(text: &str) -> Option<Number> {
    let text = text.replace(',', "");
    let end = text.rfind(|letter: char| letter.is_ascii_digit())? + 1;
    let start = text[..end]
        .rfind(|letter: char| !letter.is_ascii_digit())
        .map_or(0, |before| before + text[before..].chars().next().map_or(1, char::len_utf8));
    let digits = &text[start..end];
    let is_integer = !digits.starts_with('0') || digits.bytes().all(|digit| digit == b'0');
    is_integer.then(|| Number::new(false, digits, ""))
}

/// The last number with its sign and its decimals. A minus behind a digit or a bracket subtracts and is no sign.
pub fn last_number(text: &str) -> Option<Number> {
    let text = text.replace(',', "");
    let bytes = text.as_bytes();
    let mut last = None;
    let mut at = 0;
    while at < bytes.len() {
        if !bytes[at].is_ascii_digit() {
            at += 1;
            continue;
        }
        let whole = digits_from(bytes, at);
        let has_fraction = bytes.get(whole) == Some(&b'.') && bytes.get(whole + 1).is_some_and(u8::is_ascii_digit);
        let end = if has_fraction { digits_from(bytes, whole + 1) } else { whole };
        let fraction = if has_fraction { &text[whole + 1..end] } else { "" };
        last = Some(Number::new(is_sign(bytes, at), &text[at..whole], fraction));
        at = end;
    }
    last
}

/// Where the digits that begin at `at` are over.
fn digits_from(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|byte| !byte.is_ascii_digit()).map_or(bytes.len(), |count| at + count)
}

/// Whether the number that begins at `at` has a minus of its own: `-3`, `-$3`, `= -3`, but not `5-3`.
fn is_sign(bytes: &[u8], at: usize) -> bool {
    let before = bytes[..at].strip_suffix(b"$").unwrap_or(&bytes[..at]);
    let Some(before) = before.strip_suffix(b"-") else { return false };
    !before.last().is_some_and(|byte| byte.is_ascii_digit() || matches!(byte, b')' | b']'))
}

/// How one answer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Score {
    /// Right by the protocol that published figures use.
    pub is_right: bool,
    /// The protocol found no number in it.
    pub is_invalid: bool,
    /// Right with sign and decimals.
    pub is_right_number: bool,
}

/// Scores `answer` against the gold answer of the data, which ends in `#### 42`.
pub fn score(answer: &str, gold: &str) -> Score {
    let (digits, gold_digits) = (last_digits(answer), last_digits(gold));
    let gold_number = last_number(gold);
    Score {
        is_right: digits.is_some() && digits == gold_digits,
        is_invalid: digits.is_none(),
        is_right_number: gold_number.is_some() && last_number(answer) == gold_number,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn both(text: &str) -> (Option<String>, Option<String>) {
        (last_digits(text).map(|n| n.to_string()), last_number(text).map(|n| n.to_string()))
    }

    #[test]
    fn the_table_of_the_module_page() {
        for (text, digits, number) in [
            ("... so 5 + 7 = 12.", Some("12"), Some("12")),
            ("$1,234", Some("1234"), Some("1234")),
            ("it loses 10: -10", Some("10"), Some("-10")),
            ("$12.50", Some("50"), Some("12.5")),
            ("12.05", None, Some("12.05")),
            ("I do not know", None, None),
            ("", None, None),
        ] {
            assert_eq!(both(text), (digits.map(str::to_owned), number.map(str::to_owned)), "{text:?}");
        }
    }

    #[test]
    fn signs_zeros_and_letters_beside_digits() {
        for (text, digits, number) in [
            ("10-7", Some("7"), Some("7")),
            ("(2)-3", Some("3"), Some("3")),
            ("-$5", Some("5"), Some("-5")),
            ("= -5", Some("5"), Some("-5")),
            ("-0", Some("0"), Some("0")),
            ("000", Some("0"), Some("0")),
            ("3.", Some("3"), Some("3")),
            ("1.2.3", Some("3"), Some("3")),
            ("é7é", Some("7"), Some("7")),
            ("#### 2,280", Some("2280"), Some("2280")),
        ] {
            assert_eq!(both(text), (digits.map(str::to_owned), number.map(str::to_owned)), "{text:?}");
        }
    }

    #[test]
    fn a_wrong_sign_is_right_by_the_protocol_alone() {
        let wrong_sign = score("The answer is 10.", "It fell. #### -10");
        assert!(wrong_sign.is_right && !wrong_sign.is_right_number && !wrong_sign.is_invalid);
        let right = score("The answer is -10", "#### -10");
        assert!(right.is_right && right.is_right_number);
    }

    #[test]
    fn trailing_zeros_are_right_by_value_alone() {
        let zeros = score("$12.50", "#### 12.5");
        assert!(!zeros.is_right && zeros.is_right_number);
        let nothing = score("who knows", "#### 12");
        assert!(nothing.is_invalid && !nothing.is_right && !nothing.is_right_number);
    }

    proptest! {
        #[test]
        fn any_integer_is_read_back_with_and_without_commas(value in any::<i32>(), noise in "[a-z $.=]{0,12}") {
            let plain = format!("{noise} {value}{noise}");
            prop_assert_eq!(last_number(&plain).unwrap().to_string(), value.to_string());
            prop_assert_eq!(last_digits(&plain).unwrap().to_string(), value.unsigned_abs().to_string());
            let digits = value.unsigned_abs().to_string();
            let mut grouped = String::new();
            for (index, digit) in digits.chars().enumerate() {
                if index > 0 && (digits.len() - index) % 3 == 0 {
                    grouped.push(',');
                }
                grouped.push(digit);
            }
            prop_assert_eq!(last_digits(&grouped).unwrap().to_string(), digits);
        }

        #[test]
        fn no_text_is_a_problem(text in "\\PC{0,60}") {
            score(&text, &text);
        }
    }
}
