//! HTML by hand, with one rule: text becomes markup in [`escape`] and nowhere else.
//!
//! A result may come from anybody, and its report is opened in a browser: a model that is called `<script>` must be
//! shown as such. So every function here takes plain text and escapes it, and what is markup already has a type of its
//! own.

use std::fmt::{self, Write};

/// Markup: whatever text it was made from is escaped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Html(String);

impl Html {
    /// An empty piece.
    pub(super) const fn new() -> Self {
        Self(String::new())
    }

    /// Markup of this program's own, which holds no text from elsewhere.
    pub(super) fn fixed(markup: &'static str) -> Self {
        Self(markup.to_owned())
    }

    /// Text.
    pub(super) fn text(text: impl fmt::Display) -> Self {
        Self(escape(&text.to_string()))
    }

    /// Adds a piece.
    pub(super) fn push(&mut self, piece: &Self) -> &mut Self {
        self.0 += &piece.0;
        self
    }

    /// Adds `<name attributes>text</name>`.
    pub(super) fn element(
        &mut self,
        name: &'static str,
        attributes: &[(&'static str, &str)],
        inner: &Self,
    ) -> &mut Self {
        self.open(name, attributes);
        self.0 += &inner.0;
        self.close(name)
    }

    /// Adds the beginning of an element.
    pub(super) fn open(&mut self, name: &'static str, attributes: &[(&'static str, &str)]) -> &mut Self {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "<{name}");
        for (attribute, value) in attributes {
            let _ = write!(self.0, " {attribute}=\"{}\"", escape(value));
        }
        self.0.push('>');
        self
    }

    /// Adds the end of an element.
    pub(super) fn close(&mut self, name: &'static str) -> &mut Self {
        let _ = write!(self.0, "</{name}>");
        self
    }

    /// Whether there is nothing in it.
    #[cfg(test)]
    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text of a file.
    pub(super) fn into_string(self) -> String {
        self.0
    }
}

/// A table: the first column names the row, the others are figures.
#[derive(Clone, Debug, Default)]
pub(super) struct Grid {
    pub(super) caption: String,
    pub(super) header: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Grid {
    pub(super) fn new(caption: impl Into<String>, header: &[&str]) -> Self {
        let header = header.iter().map(|name| (*name).to_owned()).collect();
        Self { caption: caption.into(), header, rows: Vec::new() }
    }

    pub(super) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Wide tables scroll by themselves, and can be reached by the keyboard to do so.
    pub(super) fn html(&self) -> Html {
        let mut out = Html::new();
        out.open("div", &[("class", "scroll"), ("tabindex", "0"), ("role", "region"), ("aria-label", &self.caption)]);
        out.open("table", &[]).element("caption", &[], &Html::text(&self.caption)).open("thead", &[]).open("tr", &[]);
        for name in &self.header {
            out.element("th", &[("scope", "col")], &Html::text(name));
        }
        out.close("tr").close("thead").open("tbody", &[]);
        for row in &self.rows {
            out.open("tr", &[]);
            for (column, cell) in row.iter().enumerate() {
                match column {
                    0 => out.element("th", &[("scope", "row")], &Html::text(cell)),
                    _ => out.element("td", &[], &Html::text(cell)),
                };
            }
            out.close("tr");
        }
        out.close("tbody").close("table").close("div");
        out
    }

    /// Closed until somebody wants it.
    pub(super) fn folded(&self, summary: &str) -> Html {
        let mut out = Html::new();
        out.open("details", &[]).element("summary", &[], &Html::text(summary)).push(&self.html()).close("details");
        out
    }

    /// Open where it is short, else closed.
    pub(super) fn fitting(&self, summary: &str) -> Html {
        if self.rows.len() <= 24 { self.html() } else { self.folded(&format!("{summary} ({} rows)", self.rows.len())) }
    }
}

/// The characters that mean something in HTML and in attributes become entities; control characters, which no browser
/// shows and which may not stand in a file, become the sign for what cannot be shown.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            '\n' | '\t' => out.push(character),
            control if control.is_control() => out.push('\u{fffd}'),
            // Marks that turn the reading direction around could make one word look like another.
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => out.push('\u{fffd}'),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_is_text() {
        let nasty = "<script>alert('1')</script>\" onload=\"x & y\u{0}\u{202e}";
        let shown = Html::text(nasty).into_string();
        assert!(!shown.contains('<') && !shown.contains('"') && !shown.contains('\'') && !shown.contains('\u{202e}'));
        let mut out = Html::new();
        out.element("a", &[("title", nasty)], &Html::text(nasty));
        let out = out.into_string();
        assert_eq!((out.matches('<').count(), out.matches('"').count()), (2, 2), "{out}");
    }

    proptest! {
        #[test]
        fn nothing_gets_through(text: String) {
            let shown = escape(&text);
            prop_assert!(!shown.contains(['<', '>', '"', '\'']));
            let and_signs = shown.matches('&').count();
            let entities = ["&amp;", "&lt;", "&gt;", "&quot;", "&#39;"].iter().map(|e| shown.matches(e).count()).sum::<usize>();
            prop_assert_eq!(and_signs, entities);
        }
    }
}
