//! Server-sent events, from whatever pieces the network makes of them.
//!
//! ```text
//!   bytes   data: {"cho | ices": []}\n\n: ping\n\nda | ta: [DONE]\r\n\r\n
//!   events          {"choices": []}                        [DONE]
//! ```
//!
//! Lines end with LF, CR LF or CR; fields other than `data` and comments are skipped; several `data` lines are one event.
//! An event has at most [`MAX_EVENT_BYTES`]: a server that never ends one costs an error, not memory.

/// The largest event. One token is some hundred bytes; a thousand logarithms of probabilities some ten thousand.
pub const MAX_EVENT_BYTES: usize = 8 << 20;

/// Reads a stream of events.
#[derive(Debug, Default)]
pub struct SseReader {
    /// The line that is not over yet.
    line: Vec<u8>,
    /// The data of the event that is not over yet.
    data: Vec<u8>,
    has_data: bool,
    /// A CR ended the line before; an LF now belongs to it.
    after_cr: bool,
    /// Nothing was read yet: a byte order mark may come.
    started: bool,
}

/// A stream that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SseError {
    /// Larger than any event we know of.
    #[error("an event of more than {} MiB", MAX_EVENT_BYTES >> 20)]
    TooLong,
}

impl SseReader {
    /// Nothing read yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads some bytes and gives the data of every event that they complete to `each`.
    pub fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) -> Result<(), SseError> {
        let mut rest = bytes;
        while let Some(&first) = rest.first() {
            if std::mem::take(&mut self.after_cr) && first == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                return self.keep(rest);
            };
            self.after_cr = rest[end] == b'\r';
            self.keep(&rest[..end])?;
            rest = &rest[end + 1..];
            self.end_line(&mut each);
        }
        Ok(())
    }

    /// The stream is over: an event that lacks only the blank line behind it is given too.
    pub fn finish(mut self, mut each: impl FnMut(&[u8])) {
        if !self.line.is_empty() {
            self.end_line(&mut each);
        }
        self.end_event(&mut each);
    }

    fn keep(&mut self, part: &[u8]) -> Result<(), SseError> {
        if self.line.len() + self.data.len() + part.len() > MAX_EVENT_BYTES {
            return Err(SseError::TooLong);
        }
        self.line.extend_from_slice(part);
        Ok(())
    }

    fn end_line(&mut self, each: &mut impl FnMut(&[u8])) {
        let mut line = &self.line[..];
        if !std::mem::replace(&mut self.started, true) {
            line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
        }
        if line.is_empty() {
            self.line.clear();
            return self.end_event(each);
        }
        let (field, value) = match line.iter().position(|&byte| byte == b':') {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line, &[][..]),
        };
        if field == b"data" {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            self.has_data = true;
        }
        self.line.clear();
    }

    fn end_event(&mut self, each: &mut impl FnMut(&[u8])) {
        if std::mem::take(&mut self.has_data) {
            each(&self.data);
        }
        self.data.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn events(pieces: &[&[u8]]) -> Vec<String> {
        let mut found = Vec::new();
        let mut reader = SseReader::new();
        for piece in pieces {
            reader.push(piece, |data| found.push(String::from_utf8_lossy(data).into_owned())).unwrap();
        }
        reader.finish(|data| found.push(String::from_utf8_lossy(data).into_owned()));
        found
    }

    #[test]
    fn events_as_servers_write_them() {
        assert_eq!(events(&[b"data: {\"a\":1}\n\ndata: [DONE]\n\n"]), ["{\"a\":1}", "[DONE]"]);
        assert_eq!(events(&[b"data: a\r\n\r\ndata:b\r\n\r\n"]), ["a", "b"]);
        assert_eq!(events(&[b"data: a\r\rdata: b\r\r"]), ["a", "b"]);
        assert_eq!(events(&[b": ping\n\nevent: x\nid: 7\ndata: a\nretry: 1\n\n"]), ["a"]);
        assert_eq!(events(&[b"data: a\ndata:  b\n\n"]), ["a\n b"]);
        assert_eq!(events(&["\u{feff}data: a\n\n".as_bytes()]), ["a"]);
        assert_eq!(events(&[b"data\n\n"]), [""]);
        assert_eq!(events(&[b"\n\n\n", b"database: no\n\n"]), [""; 0]);
        assert_eq!(events(&[b"data: a\n\ndata: [DONE]"]), ["a", "[DONE]"], "an end without its blank line");
    }

    #[test]
    fn an_event_without_end_is_an_error() {
        let mut reader = SseReader::new();
        let piece = vec![b'x'; MAX_EVENT_BYTES / 2];
        assert_eq!(reader.push(&piece, |_| ()), Ok(()));
        assert_eq!(reader.push(&piece, |_| ()), Ok(()));
        assert_eq!(reader.push(b"x", |_| ()), Err(SseError::TooLong));
    }

    proptest! {
        /// However the network cuts a stream, the events are those of the whole.
        #[test]
        fn cuts_do_not_matter(lines in prop::collection::vec("(data: ?|: |event:|)[a-c\u{e9} :]{0,4}(\n|\r|\r\n|\n\n)", 0..12),
                              cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6)) {
            let text = lines.concat().into_bytes();
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            at.extend([0, text.len()]);
            at.sort_unstable();
            let pieces: Vec<&[u8]> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(events(&pieces), events(&[&text]));
        }
    }
}
