//! Names of foreign files, made safe to show.
//!
//! The folder of segments is everybody's, and a file name may hold anything but `/`: an escape sequence that clears the
//! screen, a newline that forges a row, a mark that turns the text's direction. All of them are shown as what they are,
//! in JSON's spelling, so that the same text is right inside JSON too: `\u001b[2J`.

use std::borrow::Cow;
use std::fmt::Write as _;

/// `text` without anything that a terminal acts upon.
pub fn printable(text: &str) -> Cow<'_, str> {
    if text.chars().all(is_harmless) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if is_harmless(character) {
            shown.push(character);
        } else {
            // All of them are below 2^16, so four digits are enough. Writing to a string does not fail.
            let _ = write!(shown, "\\u{:04x}", u32::from(character));
        }
    }
    Cow::Owned(shown)
}

/// Whether a terminal does nothing but show this character.
pub fn is_harmless(character: char) -> bool {
    let turns_direction = matches!(
        character,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{206a}'..='\u{206f}'
    );
    let ends_line = matches!(character, '\u{2028}' | '\u{2029}');
    !(character.is_control() || turns_direction || ends_line || character == '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_a_terminal_acts_upon_is_spelled_out() {
        assert_eq!(printable("a\x1b[2Jb\nc\td\u{9b}31m"), "a\\u001b[2Jb\\u000ac\\u0009d\\u009b31m");
        assert_eq!(printable("\u{202e}txt.exe"), "\\u202etxt.exe");
    }

    #[test]
    fn names_of_people_stay() {
        for name in ["kvcached_vLLM_4711", "模型-七", "cafe\u{301}", "🦀"] {
            assert!(matches!(printable(name), Cow::Borrowed(same) if same == name));
        }
    }

    proptest! {
        #[test]
        fn nothing_harmful_is_left(text: String) {
            prop_assert!(printable(&text).chars().all(is_harmless));
        }

        #[test]
        fn json_says_the_same_with_it(text: String) {
            // Spelled-out characters inside JSON are an escape of the same character.
            let json = serde_json::to_string(&text).unwrap();
            let shown = printable(&json);
            prop_assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), text);
        }
    }
}
