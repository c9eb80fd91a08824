//! Text in columns of a terminal: wide characters take two, combining ones none.

use std::borrow::Cow;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

const ELLIPSIS: char = '…';

/// How many columns a text takes.
pub fn width(text: &str) -> usize {
    text.width()
}

/// At most so many columns of a text. What is cut ends in an ellipsis.
pub fn cut(text: &str, columns: usize) -> Cow<'_, str> {
    if text.width() <= columns {
        return Cow::Borrowed(text);
    }
    if columns == 0 {
        return Cow::Borrowed("");
    }
    // The width of a beginning, and not the sum over its characters: some change the width of the one before them.
    let ends = text.char_indices().map(|(at, _)| at).take_while(|&end| text[..end].width() < columns);
    let end = ends.last().unwrap_or(0);
    let mut shown = text[..end].to_owned();
    shown.push(ELLIPSIS);
    Cow::Owned(shown)
}

/// At most so many columns of a name, cut in its middle: what tells two names apart is often at the end.
pub fn cut_middle(name: &str, columns: usize) -> Cow<'_, str> {
    if name.width() <= columns {
        return Cow::Borrowed(name);
    }
    let tail_columns = columns.saturating_sub(1) / 2;
    let starts = name.char_indices().map(|(at, _)| at).rev().take_while(|&at| name[at..].width() <= tail_columns);
    let tail = starts.last().map_or("", |at| &name[at..]);
    // A mark whose letter was cut off must not land on the ellipsis.
    let tail = tail.trim_start_matches(|character: char| character.width() == Some(0));
    let head = cut(name, columns - tail.width());
    Cow::Owned(format!("{head}{tail}"))
}

/// Exactly so many columns: cut, or filled with blanks on the right.
pub fn fit(text: &str, columns: usize) -> String {
    let mut shown = cut(text, columns).into_owned();
    let missing = columns.saturating_sub(shown.width());
    shown.extend(std::iter::repeat_n(' ', missing));
    shown
}

/// A text in lines of at most so many columns, broken between words. A word that no line has room for is cut in its middle.
pub fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace().map(|word| cut_middle(word, columns)) {
        match lines.last_mut() {
            Some(line) if line.width() + 1 + word.width() <= columns => {
                line.push(' ');
                line.push_str(&word);
                // Some characters change the width of what stands before them.
                if line.width() > columns {
                    line.truncate(line.len() - word.len() - 1);
                    lines.push(word.into_owned());
                }
            }
            _ => lines.push(word.into_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn cut_by_columns_and_not_by_characters() {
        assert_eq!(cut("kvcached", 8), "kvcached");
        assert_eq!(cut("kvcached", 7), "kvcach…");
        assert_eq!(cut("模型缓存", 8), "模型缓存");
        assert_eq!(cut("模型缓存", 7), "模型缓…");
        assert_eq!(cut("模型缓存", 6), "模型…", "half a character is none");
        assert_eq!(cut("cafe\u{301}s", 5), "cafe\u{301}s");
        assert_eq!(cut("cafe\u{301}sss", 5), "cafe\u{301}…");
        assert_eq!([cut("ab", 1), cut("ab", 0), cut("", 0)], ["…", "", ""]);
    }

    #[test]
    fn names_keep_both_ends() {
        assert_eq!(cut_middle("kvcached_vLLM_4711", 18), "kvcached_vLLM_4711");
        assert_eq!(cut_middle("kvcached_vLLM_4711", 14), "kvcache…M_4711");
        assert_eq!(cut_middle("模型缓存模型缓存", 8), "模型…存");
        assert_eq!(cut_middle("longe\u{301}x", 4), "lo…x");
        assert_eq!([cut_middle("abc", 2), cut_middle("abc", 1), cut_middle("abc", 0)], ["a…", "…", ""]);
    }

    #[test]
    fn filled_by_columns_too() {
        assert_eq!(fit("模型", 6), "模型  ");
        assert_eq!(fit("模型缓存", 6), "模型… ");
        assert_eq!(fit("cafe\u{301}", 6), "cafe\u{301}  ");
    }

    #[test]
    fn wrapped_between_words() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("one two three", 5), ["one", "two", "three"]);
        assert_eq!(wrap("模型 缓存 x", 6), ["模型", "缓存 x"]);
        assert_eq!(wrap("/a/long/folder is", 6), ["/a/…er", "is"]);
        assert_eq!(
            (wrap("hh模 x", 2), wrap("", 5), wrap("a", 0)),
            (vec!["h…".to_owned(), "x".to_owned()], vec![], vec![String::new()])
        );
    }

    proptest! {
        #[test]
        fn never_wider_than_asked(text: String, columns in 0..40usize) {
            prop_assert!(cut(&text, columns).width() <= columns);
            prop_assert!(cut_middle(&text, columns).width() <= columns);
            prop_assert_eq!(fit(&text, columns).width(), columns);
            prop_assert!(wrap(&text, columns).iter().all(|line| line.width() <= columns));
        }
    }
}
