//! Stop strings: the text ends before the first of them, wherever the borders of tokens lie.
//!
//! Read letter by letter, the stop string that is complete first ends the text; of two that end at the same letter, the
//! longer one. So the answer does not depend on how the text was cut into tokens. What might still become a stop string is held
//! back until that is decided.

/// Cuts a growing text at the first stop string.
#[derive(Clone, Debug)]
pub struct StopScanner {
    stops: Vec<String>,
    /// The end of the text so far that may be the beginning of a stop string.
    held: String,
    is_stopped: bool,
}

impl StopScanner {
    /// Empty strings stop nothing and are left out.
    pub fn new(stops: Vec<String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, held: String::new(), is_stopped: false }
    }

    /// More text; returns what may be shown.
    pub fn push(&mut self, text: &str) -> String {
        if self.is_stopped {
            return String::new();
        }
        if self.stops.is_empty() {
            return text.to_owned();
        }
        for letter in text.chars() {
            self.held.push(letter);
            let complete = self.stops.iter().filter(|stop| self.held.ends_with(stop.as_str())).map(String::len).max();
            if let Some(length) = complete {
                self.is_stopped = true;
                self.held.truncate(self.held.len() - length);
                return std::mem::take(&mut self.held);
            }
        }
        let keep = self.longest_beginning();
        let shown = self.held.len() - keep;
        self.held.drain(..shown).collect()
    }

    /// The text is over: what was held back is no stop string any more.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string was met.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Bytes at the end of what is held that begin a stop string.
    fn longest_beginning(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let starts = self.held.char_indices().map(|(at, _)| &self.held[at..]).filter(|tail| tail.len() < longest);
        starts.filter(|tail| self.stops.iter().any(|stop| stop.starts_with(tail))).map(str::len).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The dull way: look at every beginning of the whole text, shortest first.
    fn model(text: &str, stops: &[String]) -> (String, bool) {
        for (at, letter) in text.char_indices() {
            let seen = &text[..at + letter.len_utf8()];
            let stops = stops.iter().filter(|stop| !stop.is_empty() && seen.ends_with(stop.as_str()));
            if let Some(length) = stops.map(String::len).max() {
                return (seen[..seen.len() - length].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #[test]
        fn any_cut_gives_what_the_whole_text_gives(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
        ) {
            let mut scanner = StopScanner::new(stops.clone());
            let mut shown = String::new();
            let (wanted, is_stopped) = model(&pieces.concat(), &stops);
            for piece in &pieces {
                shown += &scanner.push(piece);
                prop_assert!(wanted.starts_with(&shown), "{shown:?} was shown too early: {wanted:?}");
            }
            prop_assert_eq!(scanner.is_stopped(), is_stopped);
            shown += &scanner.finish();
            prop_assert_eq!(shown, wanted);
        }
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held_back() {
        let mut scanner = StopScanner::new(vec!["\n\nUser".to_owned()]);
        assert_eq!(scanner.push("one\n"), "one");
        assert_eq!(scanner.push("two\n\nUs"), "\ntwo");
        assert_eq!(scanner.push("ed"), "\n\nUsed");
        assert_eq!(scanner.push(".\n\nUser: x"), ".");
        assert!(scanner.is_stopped());
        assert_eq!(scanner.push("more") + &scanner.finish(), "");
    }
}
