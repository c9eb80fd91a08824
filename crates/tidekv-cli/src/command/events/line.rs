//! An event as a line for people: when, what, who, and why in words.
//!
//! ```text
//!   12:03:44.120  asked          llama  80 MiB more; holds 0 B of a share of 1 GiB, and 0 B were free
//!   12:03:44.121  evict-asked    qwen   its engine is to free 80 MiB for llama
//!   12:03:44.130  reclaimed      qwen   -80 MiB for llama; holds 1.2 GiB of a share of 1 GiB
//!   12:03:44.131  granted        llama  +80 MiB; holds 80 MiB of a share of 1 GiB
//! ```

use std::fmt::Write;

use tidekv_core::units::Bytes;
use tidekv_shm::{Event, EventKind, Reason};

use super::tapes::{News, Told};
use super::{json, local_time, shown_name};
use crate::console::{Colour, Console};
use crate::scene::bound;

/// The longest kind.
const KIND_WIDTH: usize = 13;
/// Names beyond this do not push the others to the right.
const NAME_WIDTH_MAX: usize = 32;

/// How wide the columns are, and whether the device needs one.
pub(super) struct Layout {
    json: bool,
    name_width: usize,
    device_width: usize,
    first_device: Option<String>,
}

impl Layout {
    pub(super) fn new(json: bool) -> Self {
        Self { json, name_width: 0, device_width: 0, first_device: None }
    }

    /// Makes room for these. Columns only grow, so that what follows stays aligned with what was shown.
    pub(super) fn fit<'a>(&mut self, told: impl IntoIterator<Item = &'a Told>) {
        for told in told {
            let device = told.device.as_str();
            if *self.first_device.get_or_insert_with(|| device.to_owned()) != device {
                let first = self.first_device.as_ref().map_or(0, String::len);
                self.device_width = self.device_width.max(device.len()).max(first);
            }
            if let News::Event(event) = &told.news {
                self.name_width = self.name_width.max(who(event).len().min(NAME_WIDTH_MAX));
            }
        }
    }

    pub(super) fn show(&self, told: &Told, console: &mut Console) -> anyhow::Result<()> {
        if self.json {
            return Ok(console.line(json::text(told)?)?);
        }
        let device = match self.device_width {
            0 => String::new(),
            width => format!("{:<width$}  ", told.device.as_str()),
        };
        let (line, colour) = match &told.news {
            News::Missed(1) => ("... 1 event was overwritten before it could be read".to_owned(), Some(Colour::Yellow)),
            News::Missed(count) => {
                (format!("... {count} events were overwritten before they could be read"), Some(Colour::Yellow))
            }
            News::Event(event) => {
                let kind = event.kind.word();
                let name = who(event);
                let width = self.name_width;
                let text = sentence(event);
                (format!("{}  {device}{kind:<KIND_WIDTH$}  {name:<width$}  {text}", clock(event)), colour(event.kind))
            }
        };
        Ok(console.line(colour.map_or(line.clone(), |colour| console.paint(&line, colour)))?)
    }
}

fn who(event: &Event) -> String {
    event.pool.as_ref().map_or_else(|| "-".to_owned(), shown_name)
}

/// The time of day; with the date, if that is not today.
fn clock(event: &Event) -> String {
    let time = local_time(event);
    let format = if time.date() == jiff::Zoned::now().date() { "%H:%M:%S%.3f" } else { "%Y-%m-%d %H:%M:%S%.3f" };
    time.strftime(format).to_string()
}

fn colour(kind: EventKind) -> Option<Colour> {
    use EventKind::{
        Asked, Budget, Died, EvictAsked, Granted, LimitSet, Reclaimed, Refused, ShareSet, Shrunk, TrimAsked, Undone,
    };
    match kind {
        Granted => Some(Colour::Green),
        Asked | EvictAsked | Reclaimed | Shrunk | Undone => Some(Colour::Yellow),
        Refused | Died => Some(Colour::Red),
        LimitSet | ShareSet | TrimAsked | Budget => Some(Colour::BoldCyan),
        _ => None,
    }
}

/// What happened and why, in words.
pub(super) fn sentence(event: &Event) -> String {
    let Event { bytes, held, share, budget, free, .. } = event;
    let holds = format!("holds {held} of a share of {share}");
    let limit = bound(event.limit);
    let mut text = match event.kind {
        EventKind::Joined => format!("a limit of {limit}, a floor of {bytes}, weight {}", event.weight),
        EventKind::Left => format!("and gave back {bytes}"),
        EventKind::Died => {
            format!("pid {} is gone without a word; its {bytes} count until the device has them back", event.pid)
        }
        EventKind::Returned => format!("{bytes} of the dead pid {} are free again", event.pid),
        EventKind::Granted if event.reason == Reason::Ahead => format!("+{bytes} ahead of need; {holds}"),
        EventKind::Granted => format!("+{bytes}; {holds}"),
        EventKind::Undone => format!("-{bytes} of a grant: the device did not have the memory; holds {held}"),
        EventKind::Asked if event.reason == Reason::Ahead => {
            format!("{bytes} more soon; {holds}, and {free} were free for it")
        }
        EventKind::Asked => format!("{bytes} more; {holds}, and {free} were free for it"),
        EventKind::Refused => format!("{bytes}: {}", refusal(event)),
        EventKind::EvictAsked => format!("its engine is to free {bytes}{}", for_whom(event)),
        EventKind::Reclaimed => format!("-{bytes}{}; {holds}", for_whom(event)),
        EventKind::Shrunk => format!("-{bytes} above its limit of {limit}; holds {held}"),
        EventKind::TrimAsked => format!("an operator asks it to give back {bytes}"),
        EventKind::Trimmed => format!("-{bytes}, as {} asked; holds {held}", by_whom(event.reason)),
        EventKind::Decayed => format!("-{bytes} that lay idle; holds {held}"),
        EventKind::LimitSet => format!("to {} by {}; holds {held}", bound(*bytes), by_whom(event.reason)),
        EventKind::LimitApplied => format!("holds {held} under a limit of {limit}"),
        EventKind::ShareSet => format!(
            "weight {}, priority {}, a floor of {bytes}, at most {limit}, by {}",
            event.weight,
            event.priority,
            by_whom(event.reason)
        ),
        EventKind::Budget if matches!(event.reason, Reason::Given | Reason::Operator) => {
            let before = if *free == Bytes::ZERO { String::new() } else { format!("{free} -> ") };
            let author = match &event.peer {
                Some(pool) => shown_name(pool),
                None if event.reason == Reason::Operator => format!("kvctl (pid {})", event.pid),
                None => "a pool".to_owned(),
            };
            format!("{before}{budget} for all pools, by {author}; they hold {held}")
        }
        EventKind::Budget => format!("{budget} for all pools: others use {bytes} of the device; pools hold {held}"),
        // A kind of a later release, which the format does not let through.
        _ => bytes.to_string(),
    };
    if event.count > 1 {
        // Writing to a string cannot fail.
        let _ = write!(text, " ({} times)", event.count);
    }
    text
}

fn refusal(event: &Event) -> String {
    let Event { held, share, budget, free, .. } = event;
    let peer = event.peer.as_ref().map(shown_name);
    let most = |deed: &str| peer.as_ref().map_or_else(String::new, |peer| format!(", {peer} {deed}"));
    let limit = bound(event.limit);
    match event.reason {
        Reason::Limit => format!("it holds {held} under a limit of {limit}"),
        Reason::Ceiling => format!("it holds {held} under a ceiling of {limit}"),
        Reason::Held => format!(
            "{free} are free of a budget of {budget}{}; holds {held} of a share of {share}",
            most("holds most of it")
        ),
        Reason::Floors => {
            format!("{free} are free above the floors of others{}; holds {held}", most("has the largest"))
        }
        Reason::Waiters => format!(
            "{free} are free, the rest waits for pools below their share{}; holds {held} of a share of {share}",
            most("first")
        ),
        Reason::Device => "the ledger granted it and the device did not have it".to_owned(),
        Reason::Driver => "the driver failed to map it".to_owned(),
        Reason::LockTimeout => "the ledger was locked all the time; a process that uses it may be stopped".to_owned(),
        Reason::NeverFits => format!("the pool can never hold more than {free}"),
        reason => reason.word().to_owned(),
    }
}

fn for_whom(event: &Event) -> String {
    match (&event.peer, event.reason) {
        (Some(peer), _) => format!(" for {}", shown_name(peer)),
        (None, Reason::OverBudget) => format!(": pools hold more than their budget of {}", event.budget),
        (None, Reason::Limit) => format!(": its limit is {}", bound(event.limit)),
        (None, _) => " for neighbours".to_owned(),
    }
}

fn by_whom(reason: Reason) -> &'static str {
    match reason {
        Reason::Operator => "an operator",
        Reason::Engine => "the engine",
        Reason::Kvcached => "a tool of kvcached's",
        other => other.word(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use tidekv_core::units::{Bytes, GroupId};
    use tidekv_shm::UNLIMITED;
    use tidekv_shm::events::PoolRef;

    use super::*;

    pub(in crate::command::events) fn event() -> Event {
        Event {
            sequence: 1,
            at_ms: 1000,
            wall_ms: 1_750_000_000_000,
            kind: EventKind::Granted,
            reason: Reason::Need,
            count: 1,
            pool: Some(PoolRef { name: "qwen".to_owned(), group: GroupId(0) }),
            pid: 4711,
            slot: 0,
            bytes: Bytes::mib(40),
            held: Bytes::mib(512),
            demand: Bytes::ZERO,
            share: Bytes::gib(2),
            budget: Bytes::gib(8),
            limit: UNLIMITED,
            free: Bytes::mib(60),
            weight: 1,
            priority: 0,
            peer: None,
        }
    }

    fn llama() -> Option<PoolRef> {
        Some(PoolRef { name: "llama".to_owned(), group: GroupId(2) })
    }

    #[test]
    fn sentences_say_why() {
        let say = |kind, reason, peer| sentence(&Event { kind, reason, peer, ..event() });
        assert_eq!(say(EventKind::Granted, Reason::Need, None), "+40 MiB; holds 512 MiB of a share of 2 GiB");
        assert_eq!(
            say(EventKind::Refused, Reason::Floors, llama()),
            "40 MiB: 60 MiB are free above the floors of others, llama_g2 has the largest; holds 512 MiB"
        );
        assert_eq!(
            say(EventKind::Reclaimed, Reason::Neighbours, llama()),
            "-40 MiB for llama_g2; holds 512 MiB of a share of 2 GiB"
        );
        assert_eq!(
            say(EventKind::EvictAsked, Reason::OverBudget, None),
            "its engine is to free 40 MiB: pools hold more than their budget of 8 GiB"
        );
        assert_eq!(
            say(EventKind::LimitSet, Reason::Kvcached, None),
            "to 40 MiB by a tool of kvcached's; holds 512 MiB"
        );
        assert_eq!(
            say(EventKind::Budget, Reason::Operator, None),
            "60 MiB -> 8 GiB for all pools, by kvctl (pid 4711); they hold 512 MiB"
        );
        assert_eq!(
            say(EventKind::Budget, Reason::Given, llama()),
            "60 MiB -> 8 GiB for all pools, by llama_g2; they hold 512 MiB"
        );
        let often = Event { count: 12, ..event() };
        assert!(sentence(&often).ends_with(" (12 times)"));
    }

    #[test]
    fn every_kind_and_reason_has_a_sentence_of_one_line() {
        for &kind in EventKind::ALL {
            assert!(kind.word().len() <= KIND_WIDTH, "{}", kind.word());
            for &reason in Reason::ALL {
                for peer in [None, llama()] {
                    let text = sentence(&Event { kind, reason, peer, ..event() });
                    assert!(!text.is_empty() && !text.contains('\n') && !text.contains("EiB"), "{text}");
                }
            }
        }
    }
}
