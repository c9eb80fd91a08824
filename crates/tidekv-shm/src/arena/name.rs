//! What an arena is called, and what its file is called.
//!
//! `kvcached-arena-<uid>-<name>`; while it is being made, the same with a `.` and numbers behind it. Names are not cleaned
//! as pool names are: two processes that meant different arenas must not meet in one.

use std::fmt;

use rustix::process::geteuid;

use super::error::ArenaError;
use crate::names::{NAME_MAX, is_name_byte};
use crate::private_file::UNFINISHED;

/// The name of an arena: 1 to 64 of `A-Z`, `a-z`, `0-9`, `_` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArenaName(String);

impl ArenaName {
    /// Checks a name.
    pub fn new(text: &str) -> Result<Self, ArenaError> {
        if text.is_empty() || text.len() > NAME_MAX || !text.bytes().all(is_name_byte) {
            return Err(ArenaError::Name(text.chars().take(2 * NAME_MAX).collect()));
        }
        Ok(Self(text.to_owned()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(super) fn file_name(&self) -> String {
        prefix() + &self.0
    }

    /// The arena that a file of this name is.
    pub(super) fn of_file(file_name: &str) -> Option<Self> {
        Self::new(file_name.strip_prefix(&prefix())?).ok()
    }
}

impl fmt::Display for ArenaName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Whether a file is an arena that was never finished.
pub(super) fn is_unfinished(file_name: &str) -> bool {
    let rest = file_name.strip_prefix(&prefix());
    rest.and_then(|rest| rest.split_once(UNFINISHED)).is_some_and(|(name, _)| ArenaName::new(name).is_ok())
}

fn prefix() -> String {
    format!("kvcached-arena-{}-", geteuid().as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_and_not_changed() {
        for bad in ["", "a/b", "..", "a.b", "ü", &"x".repeat(65)] {
            let error = ArenaName::new(bad).unwrap_err();
            assert!(error.to_string().contains("cannot name an arena"), "{error}");
        }
        let name = ArenaName::new("kv_1-a").unwrap();
        assert_eq!(ArenaName::of_file(&name.file_name()), Some(name.clone()));
        assert_eq!(ArenaName::of_file(&(name.file_name() + ".7-8-9")), None);
        assert!(is_unfinished(&(name.file_name() + ".7-8-9")) && !is_unfinished(&name.file_name()));
    }
}
