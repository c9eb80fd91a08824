//! A typed line into words, as people expect of a shell: quotes, backslashes, comments. Nothing is ever expanded.
//!
//! | written        | is                                                                             |
//! |----------------|--------------------------------------------------------------------------------|
//! | blank          | the end of a word                                                              |
//! | `'...'`        | what stands there                                                              |
//! | `"..."`        | what stands there; a backslash before `"`, `\`, `$` or `` ` `` is left out     |
//! | `\x`           | `x`, also if that is a blank, a quote or a `#`                                 |
//! | `#` at a start | a comment, to the end of the line                                              |
//!
//! `$`, `*`, `~` and the like are letters. The place of each word is kept: completion replaces words where they stand.

/// A line, split.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    /// Its words.
    pub(super) words: Vec<Word>,
    /// What the line began and did not end; its text is in the last word.
    pub(super) open: Option<Open>,
}

/// One word of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Word {
    /// Without quotes and backslashes.
    pub(super) text: String,
    /// Where it begins in the line, in bytes, quotes included.
    pub(super) start: usize,
    /// Whether a quote or a backslash is in it: then it is meant literally.
    pub(super) quoted: bool,
}

/// Something without an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Open {
    /// A quote of this kind.
    Quote(char),
    /// A backslash with nothing behind it.
    Backslash,
}

/// Splits a line. Every line can be split; whether it makes sense is for others to say.
pub(super) fn split(line: &str) -> Split {
    let mut split = Split::default();
    let mut letters = line.char_indices();
    let mut word: Option<Word> = None;
    while let Some((at, letter)) = letters.next() {
        if letter.is_whitespace() {
            split.words.extend(word.take());
            continue;
        }
        if letter == '#' && word.is_none() {
            break;
        }
        let word = word.get_or_insert_with(|| Word { text: String::new(), start: at, quoted: false });
        let mut letters = letters.by_ref().map(|(_, letter)| letter);
        let open = match letter {
            '\'' => single_quoted(&mut letters, &mut word.text),
            '"' => double_quoted(&mut letters, &mut word.text),
            '\\' => backslashed(&mut letters, &mut word.text),
            plain => {
                word.text.push(plain);
                continue;
            }
        };
        word.quoted = true;
        split.open = open;
    }
    split.words.extend(word);
    split
}

fn single_quoted(letters: &mut impl Iterator<Item = char>, text: &mut String) -> Option<Open> {
    for letter in letters {
        if letter == '\'' {
            return None;
        }
        text.push(letter);
    }
    Some(Open::Quote('\''))
}

fn double_quoted(letters: &mut impl Iterator<Item = char>, text: &mut String) -> Option<Open> {
    while let Some(letter) = letters.next() {
        match letter {
            '"' => return None,
            '\\' => match letters.next() {
                Some(escaped @ ('"' | '\\' | '$' | '`')) => text.push(escaped),
                Some(other) => text.extend(['\\', other]),
                None => return Some(Open::Backslash),
            },
            plain => text.push(plain),
        }
    }
    Some(Open::Quote('"'))
}

fn backslashed(letters: &mut impl Iterator<Item = char>, text: &mut String) -> Option<Open> {
    match letters.next() {
        Some(letter) => {
            text.push(letter);
            None
        }
        None => Some(Open::Backslash),
    }
}

/// `text` so that [`split`] takes it for one word, as it is.
pub(super) fn quote(text: &str) -> String {
    let is_plain = |letter: char| letter.is_alphanumeric() || "_-./:=,+@%".contains(letter);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn texts(line: &str) -> Vec<String> {
        let split = split(line);
        assert_eq!(split.open, None, "{line:?}");
        split.words.into_iter().map(|word| word.text).collect()
    }

    #[test]
    fn what_people_write() {
        for (line, words) in [
            ("", &[][..]),
            (" \t ", &[]),
            ("  limit  VLLM\t20G ", &["limit", "VLLM", "20G"]),
            ("limit 'my pool' 20G", &["limit", "my pool", "20G"]),
            (r#"a"b c"'d'e"#, &["ab cde"]),
            (r#""say \"hi\" \n""#, &[r#"say "hi" \n"#]),
            (r"my\ pool \#1 \\", &["my pool", "#1", r"\"]),
            ("'' \"\"", &["", ""]),
            ("list # all of them", &["list"]),
            ("a#b", &["a#b"]),
            ("$HOME *.txt ~ $(ls)", &["$HOME", "*.txt", "~", "$(ls)"]),
            ("gr\u{f6}\u{df}e\u{a0}2", &["größe", "2"]),
        ] {
            assert_eq!(texts(line), words, "{line:?}");
        }
    }

    #[test]
    fn what_has_no_end_is_named() {
        for (line, open) in [
            ("list 'a", Open::Quote('\'')),
            ("list \"a b", Open::Quote('"')),
            ("list a\\", Open::Backslash),
            ("list \"a\\", Open::Backslash),
        ] {
            assert_eq!(split(line).open, Some(open), "{line:?}");
        }
        let split = split("list 'my po");
        assert_eq!(split.words[1], Word { text: "my po".to_owned(), start: 5, quoted: true });
    }

    proptest! {
        #[test]
        fn any_line_can_be_split_and_words_stand_where_it_is_said(line in ".{0,60}") {
            let split = split(&line);
            let mut end = 0;
            for word in &split.words {
                prop_assert!(word.start >= end && line.is_char_boundary(word.start));
                // Nothing is invented: every letter of a word is one of the line.
                prop_assert!(word.start + word.text.len() <= line.len());
                end = word.start + 1;
            }
        }

        #[test]
        fn what_was_quoted_comes_back(words in proptest::collection::vec("\\PC{0,12}", 0..6)) {
            let line: Vec<String> = words.iter().map(|word| quote(word)).collect();
            prop_assert_eq!(texts(&line.join(" ")), words);
        }
    }
}
