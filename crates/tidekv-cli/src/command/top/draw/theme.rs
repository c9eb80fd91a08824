//! Colours and emphasis, in one place. Whatever a colour says is also said by a character, a word or a number, so
//! nothing is lost with `NO_COLOR`; emphasis (bold, dim, reversed) is not colour and stays.

use ratatui::style::{Color, Modifier, Style};

use crate::command::table::Pressure;

/// Whether there is colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Theme {
    /// If not, only emphasis.
    pub colour: bool,
}

impl Theme {
    fn fg(self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    /// The title and the titles of columns.
    pub(super) fn title(self) -> Style {
        self.fg(Color::Cyan).add_modifier(Modifier::BOLD)
    }

    /// What must not be overlooked.
    pub(super) fn alert(self) -> Style {
        self.fg(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// A letter to press.
    pub(super) fn key(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// By how close a pool is to its limit, as in kvcached's tools.
    pub(super) fn pressure(self, pressure: Pressure) -> Style {
        self.fg(match pressure {
            Pressure::Low => Color::Green,
            Pressure::Middle => Color::Yellow,
            Pressure::High => Color::Red,
        })
    }

    /// The reserve.
    pub(super) fn idle(self) -> Style {
        self.fg(Color::Yellow)
    }

    /// What is wanted and not there.
    pub(super) fn wanted(self) -> Style {
        self.fg(Color::Magenta)
    }

    /// What others than pools use.
    pub(super) fn other(self) -> Style {
        self.fg(Color::Blue)
    }

    /// What nobody uses.
    pub(super) fn free(self) -> Style {
        self.fg(Color::DarkGray)
    }

    /// A fair share or a budget.
    pub(super) fn mark(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// A row that is no more.
    pub(super) fn gone(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    /// The selected row.
    pub(super) fn selected(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }
}
