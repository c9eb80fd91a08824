//! From bytes to JSON values: one value, or several with white space between them, which is what `--append-result` of
//! the load generators makes (JSON lines).

use serde_json::{Deserializer, Value};

use crate::result::{ResultError, explain};

/// The words that Python writes for numbers that are none.
const NOT_NUMBERS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];

/// All values of a file. There is at least one.
pub(super) fn values(bytes: &[u8]) -> Result<Vec<Value>, ResultError> {
    let mut found = Vec::new();
    for value in Deserializer::from_slice(bytes).into_iter::<Value>() {
        found.push(value.map_err(|error| explain(bytes, &error))?);
    }
    if found.is_empty() {
        let error = serde_json::from_slice::<Value>(bytes).err();
        return Err(error.map_or(ResultError::NotAnObject, |error| explain(bytes, &error)));
    }
    Ok(found)
}

/// The same text with `null` for every number that is none. Words inside strings stay.
pub(super) fn without_nan(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let (mut at, mut in_string) = (0, false);
    while let Some(&byte) = bytes.get(at) {
        let word = NOT_NUMBERS.iter().find(|word| !in_string && bytes[at..].starts_with(word));
        let taken = match (word, byte) {
            (Some(word), _) => {
                out.extend_from_slice(b"null");
                at += word.len();
                continue;
            }
            (None, b'\\') if in_string => 2,
            (None, b'"') => {
                in_string = !in_string;
                1
            }
            _ => 1,
        };
        let end = (at + taken).min(bytes.len());
        out.extend_from_slice(&bytes[at..end]);
        at = end;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_value_or_several() {
        assert_eq!(values(b"{\"a\": 1}").unwrap().len(), 1);
        assert_eq!(values(b"{\"a\": 1}\n{\"a\": 2}\n\n").unwrap().len(), 2);
        assert!(values(b" \n").unwrap_err().to_string().contains("empty"));
        let cut_off = values(b"{\"a\": 1}\n{\"a\": ").unwrap_err().to_string();
        assert!(cut_off.contains("too early") && cut_off.contains("line 2"), "{cut_off}");
    }

    #[test]
    fn words_for_no_number_go_and_those_in_strings_stay() {
        let text = br#"{"a": NaN, "b": [-Infinity, 1, Infinity], "c": "NaN \" NaN", "d": -1}"#;
        let kept = String::from_utf8(without_nan(text)).unwrap();
        assert_eq!(kept, r#"{"a": null, "b": [null, 1, null], "c": "NaN \" NaN", "d": -1}"#);
    }

    proptest! {
        /// Whatever is JSON already stays what it is, to the byte.
        #[test]
        fn what_is_json_stays(words in prop::collection::vec("\\PC*", 0..6)) {
            let text = serde_json::to_vec(&words).unwrap();
            prop_assert_eq!(without_nan(&text), text);
        }

        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = values(&bytes);
            let _ = values(&without_nan(&bytes));
        }
    }
}
