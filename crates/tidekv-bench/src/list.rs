//! Lists on the command line: `--page-size 2M,16M,128M`, `--k 1,16,64`.
//!
//! One parser for every flag that takes several values. Entries are separated by commas, by spaces, or by
//! both; a unit may stand apart from its number (`2 MiB, 16 MiB`). An empty entry, a value given twice and an
//! absurdly long list are refused, each with one sentence.

use std::fmt;
use std::ops::Deref;
use std::str::FromStr;

/// No flag of ours has a use for more: each entry is a measurement of its own.
pub const MAX_ENTRIES: usize = 64;

/// A non-empty list of distinct values, in the order given. Use it as the type of a clap argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List<T>(Vec<T>);

impl<T> Deref for List<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: FromStr + PartialEq> FromStr for List<T>
where
    T::Err: fmt::Display,
{
    type Err = ListError;

    fn from_str(text: &str) -> Result<Self, ListError> {
        let mut values = Vec::new();
        for part in text.split(',') {
            parse_part(part, &mut |entry, value| {
                if values.contains(&value) {
                    return Err(ListError::Repeated { entry: entry.to_owned() });
                }
                if values.len() == MAX_ENTRIES {
                    return Err(ListError::TooLong);
                }
                values.push(value);
                Ok(())
            })?;
        }
        Ok(Self(values))
    }
}

/// What stands between two commas: one value, or several with spaces between them. The whole is tried first
/// because `2 MiB` is one value.
fn parse_part<T: FromStr>(part: &str, keep: &mut dyn FnMut(&str, T) -> Result<(), ListError>) -> Result<(), ListError>
where
    T::Err: fmt::Display,
{
    let part = part.trim();
    if part.is_empty() {
        return Err(ListError::EmptyEntry);
    }
    if let Ok(value) = part.parse() {
        return keep(part, value);
    }
    for entry in part.split_whitespace() {
        match entry.parse() {
            Ok(value) => keep(entry, value)?,
            Err(error) => {
                return Err(ListError::Entry { entry: entry.to_owned(), reason: error.to_string() });
            }
        }
    }
    Ok(())
}

/// Why a text is not a list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ListError {
    /// `1,,2`, `1,` or nothing at all.
    #[error("an entry is empty: write values separated by commas, such as 1,16,64")]
    EmptyEntry,
    /// The same value twice would be measured twice under one name.
    #[error("{entry} is given twice")]
    Repeated {
        /// The second occurrence as written.
        entry: String,
    },
    /// More than [`MAX_ENTRIES`].
    #[error("a list has at most {MAX_ENTRIES} entries")]
    TooLong,
    /// An entry that its own type refuses.
    #[error("{entry:?}: {reason}")]
    Entry {
        /// The entry as written.
        entry: String,
        /// What the type of the entry says about it.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidekv_core::units::Bytes;

    fn sizes(text: &str) -> Result<Vec<u64>, ListError> {
        text.parse::<List<Bytes>>().map(|list| list.iter().map(|bytes| bytes.0 >> 20).collect())
    }

    #[test]
    fn commas_spaces_and_units_that_stand_apart() {
        for text in ["2M,16M,128M", "2M 16M 128M", " 2M, 16M,128M ", "2M 16M,128M", "2 MiB, 16 MiB, 128 MiB"] {
            assert_eq!(sizes(text), Ok(vec![2, 16, 128]), "{text:?}");
        }
        assert_eq!(sizes("2M"), Ok(vec![2]));
    }

    #[test]
    fn refusals_name_the_entry() {
        assert_eq!(sizes(""), Err(ListError::EmptyEntry));
        assert_eq!(sizes("2M,,4M"), Err(ListError::EmptyEntry));
        assert_eq!(sizes("2M,"), Err(ListError::EmptyEntry));
        assert_eq!(sizes("2M,2048K"), Err(ListError::Repeated { entry: "2048K".into() }));
        let error = sizes("2M,4X").unwrap_err().to_string();
        assert!(error.starts_with("\"4X\": ") && error.contains("not a unit"), "{error}");
        let error = "1,x".parse::<List<u32>>().unwrap_err().to_string();
        assert!(error.starts_with("\"x\": "), "{error}");
    }

    #[test]
    fn a_list_is_bounded() {
        let numbers = |n: usize| (0..n).map(|i| i.to_string()).collect::<Vec<_>>().join(",");
        assert_eq!(numbers(MAX_ENTRIES).parse::<List<u32>>().unwrap().len(), MAX_ENTRIES);
        assert_eq!(numbers(MAX_ENTRIES + 1).parse::<List<u32>>(), Err(ListError::TooLong));
    }

    proptest! {
        #[test]
        fn any_distinct_numbers_come_back_in_order(set in prop::collection::hash_set(any::<u32>(), 1..20),
                                                   separator in prop::sample::select(vec![",", " ", ", ", " ,  "])) {
            let numbers: Vec<u32> = set.into_iter().collect();
            let text = numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(separator);
            prop_assert_eq!(&*text.parse::<List<u32>>().unwrap(), &numbers[..]);
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = text.parse::<List<Bytes>>();
        }
    }
}
