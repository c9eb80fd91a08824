//! Text of an answer while it is being made: what is certain is shown at once, what may still change is held.
//!
//! A token may end in the middle of a character, and what a token is as text may depend on those before it. So the tokens since
//! the last-but-one time that text was shown are decoded together, and what is new at the end is shown:
//!
//! ```text
//!   tokens   ...  [ a  b  c | d  e ]          window: context | new
//!                   sent      ^^^^ held while it ends in U+FFFD: perhaps half a character
//! ```
//!
//! A model may also write bytes that are no text at all. After `HELD_TOKENS` tokens, more than a character can have, all but
//! the last U+FFFD is certain, and is shown. And it may write tokens without any text, such as special ones and those that only fill
//! a vocabulary up: as many of them are forgotten. So the window is bounded.

use std::sync::Arc;

use super::{Tokenizer, Words, bytes};

/// More tokens than one character has bytes.
const HELD_TOKENS: usize = 8;
/// Tokens of the prompt that the first ones of the answer are decoded with.
const CONTEXT_TOKENS: usize = 5;
const UNKNOWN: char = char::REPLACEMENT_CHARACTER;

/// Decodes one answer.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Bytes that are not yet a character.
    Bytes(Vec<u8>),
    Window(Window),
}

#[derive(Debug)]
struct Window {
    tokens: Vec<u32>,
    /// How many of them are context: their text was shown before.
    context: usize,
    /// Bytes of the window's text that were shown.
    sent: usize,
}

impl TextStream {
    /// The answer to a prompt.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32]) -> Self {
        let state = match tokenizer.words {
            Words::Bytes => State::Bytes(Vec::new()),
            Words::Json(_) => {
                let tokens = prompt[prompt.len().saturating_sub(CONTEXT_TOKENS)..].to_vec();
                let sent = tokenizer.decode(&tokens).len();
                State::Window(Window { context: tokens.len(), tokens, sent })
            }
        };
        Self { tokenizer, state }
    }

    /// The next token; returns the text that is certain now.
    pub fn push(&mut self, id: u32) -> String {
        match &mut self.state {
            State::Bytes(held) => {
                held.extend(bytes::byte(id));
                certain(held)
            }
            State::Window(window) => window.push(id, &self.tokenizer),
        }
    }

    /// There are no more tokens; returns what was held.
    pub fn finish(&mut self) -> String {
        match &mut self.state {
            State::Bytes(held) => String::from_utf8_lossy(&std::mem::take(held)).into_owned(),
            State::Window(window) => window.finish(&self.tokenizer),
        }
    }
}

impl Window {
    fn push(&mut self, id: u32, tokenizer: &Tokenizer) -> String {
        self.tokens.push(id);
        let text = tokenizer.decode(&self.tokens);
        let is_open = text.ends_with(UNKNOWN);
        if is_open && tokenizer.decode(&[id]).is_empty() {
            // It has no text, and must not use up the room of the character around it.
            self.tokens.pop();
            return String::new();
        }
        let has_news = text.len() > self.sent;
        if (is_open || !has_news) && self.tokens.len() - self.context < HELD_TOKENS {
            return String::new();
        }
        if !has_news {
            // Nothing came of so many. The context stays: what the next token is as text may depend on it.
            self.tokens.truncate(self.context);
            return String::new();
        }
        let held = if is_open { UNKNOWN.len_utf8() } else { 0 };
        let shown = from(&text[..text.len() - held], self.sent);
        // What was new is the context of what comes.
        self.tokens.drain(..self.context);
        self.context = self.tokens.len();
        self.sent = tokenizer.decode(&self.tokens).len().saturating_sub(held);
        shown
    }

    fn finish(&mut self, tokenizer: &Tokenizer) -> String {
        let text = tokenizer.decode(&self.tokens);
        let shown = from(&text, self.sent);
        self.sent = text.len();
        shown
    }
}

/// The text behind the first `sent` bytes, from the next whole character on.
fn from(text: &str, sent: usize) -> String {
    let start = (sent..text.len()).find(|&at| text.is_char_boundary(at));
    start.map_or_else(String::new, |start| text[start..].to_owned())
}

/// Takes whole characters, and U+FFFD for what can never be one, as `String::from_utf8_lossy` would.
fn certain(held: &mut Vec<u8>) -> String {
    let mut text = String::new();
    loop {
        match std::str::from_utf8(held) {
            Ok(rest) => {
                text += rest;
                held.clear();
                return text;
            }
            Err(error) => {
                let valid: Vec<u8> = held.drain(..error.valid_up_to()).collect();
                text += &String::from_utf8_lossy(&valid);
                let Some(broken) = error.error_len() else { return text };
                held.drain(..broken);
                text.push(UNKNOWN);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tokenizer::folder::tests::write_tokenizer;

    fn byte_level() -> Arc<Tokenizer> {
        let folder = tempfile::tempdir().unwrap();
        write_tokenizer(folder.path());
        Arc::new(Tokenizer::from_folder(folder.path()).unwrap())
    }

    /// All the text, and a check that nothing was shown that the whole does not begin with.
    fn streamed(tokenizer: &Arc<Tokenizer>, prompt: &[u32], ids: &[u32]) -> (String, Vec<String>) {
        let mut stream = TextStream::new(Arc::clone(tokenizer), prompt);
        let mut pieces: Vec<_> = ids.iter().map(|&id| stream.push(id)).collect();
        pieces.push(stream.finish());
        (pieces.concat(), pieces)
    }

    /// Any byte, and now and then a token without text: a special one, or one that nobody knows.
    fn noise() -> impl Strategy<Value = u32> {
        prop_oneof![4 => any::<u8>().prop_map(u32::from), 1 => Just(256), 1 => Just(100_000)]
    }

    proptest! {
        #[test]
        fn bytes_give_what_they_give_together(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let ids: Vec<u32> = bytes.iter().copied().map(u32::from).collect();
            let (text, _) = streamed(&Arc::new(Tokenizer::bytes()), &[256], &ids);
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn text_arrives_whole_and_never_in_halves(text in any::<String>(), prompt in "[a-zé]{0,9}") {
            // U+FFFD in the text itself cannot be told from half a character: it is shown a little later, and not lost.
            for tokenizer in [Arc::new(Tokenizer::bytes()), byte_level()] {
                let ids = tokenizer.encode_with(&text, false).unwrap();
                let (whole, pieces) = streamed(&tokenizer, &tokenizer.encode(&prompt).unwrap(), &ids);
                prop_assert_eq!(&whole, &text);
                if !text.contains(UNKNOWN) {
                    prop_assert!(pieces.iter().all(|piece| !piece.contains(UNKNOWN)));
                }
            }
        }

        #[test]
        fn noise_through_a_window_gives_what_it_gives_together(ids in prop::collection::vec(noise(), 0..64)) {
            let tokenizer = byte_level();
            let (text, _) = streamed(&tokenizer, &[], &ids);
            prop_assert_eq!(text, tokenizer.decode(&ids));
        }
    }

    #[test]
    fn a_character_is_shown_with_its_last_byte() {
        for tokenizer in [Arc::new(Tokenizer::bytes()), byte_level()] {
            let (_, pieces) = streamed(&tokenizer, &[97], &"é😀".bytes().map(u32::from).collect::<Vec<_>>());
            assert_eq!(pieces, ["", "é", "", "", "", "😀", ""]);
        }
    }

    /// Bytes that are no text, a special token, an id that nobody knows; alone, and between others.
    #[test]
    fn the_window_is_bounded_whatever_the_model_writes() {
        for pattern in [&[0xff][..], &[256], &[100_000], &[256, 0xff], &[0xf0, 256, 100_000], &[97, 256, 257, 100_000]]
        {
            let tokenizer = byte_level();
            let mut stream = TextStream::new(Arc::clone(&tokenizer), &[97]);
            let ids: Vec<u32> = pattern.iter().copied().cycle().take(1000).collect();
            let mut shown = String::new();
            for &id in &ids {
                shown += &stream.push(id);
                let State::Window(window) = &stream.state else { panic!("not a window") };
                assert!(window.tokens.len() <= 2 * HELD_TOKENS, "{pattern:?}");
            }
            shown += &stream.finish();
            assert_eq!(shown, tokenizer.decode(&ids), "{pattern:?}");
        }
    }
}
