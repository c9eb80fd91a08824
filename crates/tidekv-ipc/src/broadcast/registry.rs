//! The strategies by name: one line each, which is all that a new one needs beside its file.
//! `docs/adding-a-strategy.md` shows it.

use super::Strategy;

/// A strategy that can be chosen.
#[derive(Clone, Copy, Debug)]
pub struct StrategyEntry {
    /// How people choose it.
    pub name: &'static str,
    /// Where its code is, beside this file.
    pub file: &'static str,
    /// What it does.
    pub summary: &'static str,
    /// Makes one.
    pub make: fn() -> Box<dyn Strategy>,
}

/// Declares each strategy's module and its entry, from one line.
macro_rules! strategies {
    ($($name:literal, $file:literal, $module:ident::$strategy:ident, $summary:literal;)*) => {
        $(
            #[path = $file]
            mod $module;
        )*

        /// Every strategy, simplest first.
        pub const STRATEGIES: &[StrategyEntry] = &[$(
            StrategyEntry {
                name: $name,
                file: $file,
                summary: $summary,
                make: || Box::new($module::$strategy::default()),
            },
        )*];
    };
}

strategies! {
    "seq", "seq.rs", seq::Sequential, "one worker after another";
    "thread", "thread.rs", thread::Pool, "a thread for each rank";
    "async", "async_.rs", async_::Reactor, "one reactor for all sockets";
    "ring", "ring.rs", ring::Rings, "shared memory, a futex and a short spin";
}

/// A name that no strategy has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no broadcast strategy '{name}'; there are: {known}; docs/adding-a-strategy.md shows how to add one")]
pub struct UnknownStrategy {
    /// What was asked for.
    pub name: String,
    /// What there is.
    pub known: String,
}

/// The strategy of this name.
pub fn strategy(name: &str) -> Result<&'static StrategyEntry, UnknownStrategy> {
    STRATEGIES.iter().find(|entry| entry.name == name).ok_or_else(|| UnknownStrategy {
        name: name.to_owned(),
        known: STRATEGIES.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", "),
    })
}
