//! Whether a model sleeps: the state machine, and when an idle one may fall asleep. No clock and no engine in here.
//!
//! | from          | event                               | to            |
//! |---------------|-------------------------------------|---------------|
//! | Awake         | idle long enough, or told to        | FallingAsleep |
//! | FallingAsleep | the engine has given memory back    | Asleep        |
//! | FallingAsleep | the engine refused                  | Awake         |
//! | Awake         | the engine says that it sleeps      | Asleep        |
//! | Asleep        | a request came, or told to          | Waking        |
//! | Awake         | told to wake up all the same        | Waking        |
//! | Waking        | the engine has its memory again     | Awake         |
//! | Waking        | the engine refused                  | as before     |
//! | any           | its process is gone                 | Awake         |
//!
//! A model falls asleep only while nobody is present: a request counts from its arrival to the last byte of its answer. Idle
//! time counts from the end of the last request, and for a model that was never used from the moment it could be. One that slept less
//! than the shortest sleep wakes up later, and whoever asks waits.
//!
//! An engine may sleep without anybody here knowing: somebody else told it to, or it slept before the router came. So what is known is
//! never a reason not to wake it.

use std::time::{Duration, Instant};

/// When models sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SleepSettings {
    /// Whether idle models are put to sleep without being told to.
    pub is_automatic: bool,
    /// Idle for so long, a model may sleep.
    pub idle_threshold: Duration,
    /// How often that is looked at.
    pub check_interval: Duration,
    /// Whether a request wakes a model up; else it is refused.
    pub wakes_on_request: bool,
    /// A model that fell asleep sleeps at least so long.
    pub min_sleep: Duration,
    /// 1 gives the KV cache back, 2 the weights too where the engine can.
    pub level: u8,
}

impl Default for SleepSettings {
    /// kvcached's.
    fn default() -> Self {
        Self {
            is_automatic: false,
            idle_threshold: Duration::from_secs(300),
            check_interval: Duration::from_secs(60),
            wakes_on_request: true,
            min_sleep: Duration::from_secs(60),
            level: 1,
        }
    }
}

/// Whether a model sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    Awake,
    FallingAsleep,
    Asleep {
        since: Instant,
    },
    /// None where it was told to although it was awake as far as anybody knew.
    Waking {
        asleep_since: Option<Instant>,
    },
}

/// What happens to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RestEvent {
    ToSleep,
    Slept { at: Instant },
    SleepRefused,
    FoundAsleep { since: Instant },
    ToWake,
    Woke,
    WakeRefused,
    ProcessGone,
}

impl Rest {
    /// The table of this module; `None` for what cannot happen there.
    pub(crate) fn next(self, event: RestEvent) -> Option<Self> {
        Some(match (self, event) {
            (_, RestEvent::ProcessGone) => Self::Awake,
            (Self::Awake, RestEvent::ToSleep) => Self::FallingAsleep,
            (Self::FallingAsleep, RestEvent::Slept { at }) => Self::Asleep { since: at },
            (Self::FallingAsleep, RestEvent::SleepRefused) => Self::Awake,
            (Self::Awake, RestEvent::FoundAsleep { since }) => Self::Asleep { since },
            (Self::Asleep { since }, RestEvent::ToWake) => Self::Waking { asleep_since: Some(since) },
            (Self::Awake, RestEvent::ToWake) => Self::Waking { asleep_since: None },
            (Self::Waking { .. }, RestEvent::Woke) => Self::Awake,
            (Self::Waking { asleep_since: Some(since) }, RestEvent::WakeRefused) => Self::Asleep { since },
            (Self::Waking { asleep_since: None }, RestEvent::WakeRefused) => Self::Awake,
            _ => return None,
        })
    }

    /// Since when it sleeps, if it does.
    pub(crate) fn asleep_since(self) -> Option<Instant> {
        match self {
            Self::Asleep { since } => Some(since),
            _ => None,
        }
    }
}

/// How long to wait before a sleeping model may be woken; zero when it may be now.
pub(crate) fn until_wakeable(since: Instant, min_sleep: Duration, now: Instant) -> Duration {
    (since + min_sleep).saturating_duration_since(now)
}

/// Whether an idle model should fall asleep now.
pub(crate) fn should_sleep(settings: &SleepSettings, rest: Rest, present: usize, idle: Duration) -> bool {
    settings.is_automatic && rest == Rest::Awake && present == 0 && idle >= settings.idle_threshold
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SETTINGS: SleepSettings = SleepSettings {
        is_automatic: true,
        idle_threshold: Duration::from_secs(10),
        check_interval: Duration::from_secs(1),
        wakes_on_request: true,
        min_sleep: Duration::from_secs(5),
        level: 1,
    };

    #[test]
    fn sleeps_only_awake_idle_and_alone() {
        let long = Duration::from_secs(10);
        assert!(should_sleep(&SETTINGS, Rest::Awake, 0, long));
        assert!(!should_sleep(&SETTINGS, Rest::Awake, 1, long), "somebody is present");
        assert!(!should_sleep(&SETTINGS, Rest::Awake, 0, long - Duration::from_nanos(1)));
        assert!(!should_sleep(&SETTINGS, Rest::Asleep { since: Instant::now() }, 0, long));
        let by_hand = SleepSettings { is_automatic: false, ..SETTINGS };
        assert!(!should_sleep(&by_hand, Rest::Awake, 0, long));
    }

    #[test]
    fn the_shortest_sleep_is_waited_for() {
        let since = Instant::now();
        let after = |seconds| until_wakeable(since, SETTINGS.min_sleep, since + Duration::from_secs(seconds));
        assert_eq!((after(0), after(3)), (Duration::from_secs(5), Duration::from_secs(2)));
        assert_eq!((after(5), after(60)), (Duration::ZERO, Duration::ZERO));
    }

    fn events() -> impl Strategy<Value = RestEvent> {
        let at = Instant::now();
        prop_oneof![
            Just(RestEvent::ToSleep),
            Just(RestEvent::Slept { at }),
            Just(RestEvent::SleepRefused),
            Just(RestEvent::FoundAsleep { since: at }),
            Just(RestEvent::ToWake),
            Just(RestEvent::Woke),
            Just(RestEvent::WakeRefused),
            Just(RestEvent::ProcessGone),
        ]
    }

    proptest! {
        /// Against a flag, whether the engine has its memory as far as anybody knows, and what it is being asked, if anything.
        #[test]
        fn the_machine_agrees_with_two_flags(events in prop::collection::vec(events(), 0..200)) {
            let (mut rest, mut has_memory, mut asked) = (Rest::Awake, true, None);
            for event in events {
                let next = rest.next(event);
                let legal = match event {
                    RestEvent::ProcessGone => true,
                    RestEvent::ToSleep | RestEvent::FoundAsleep { .. } => has_memory && asked.is_none(),
                    RestEvent::ToWake => asked.is_none(),
                    RestEvent::Slept { .. } | RestEvent::SleepRefused => asked == Some("sleep"),
                    RestEvent::Woke | RestEvent::WakeRefused => asked == Some("wake"),
                };
                prop_assert_eq!(next.is_some(), legal, "{:?} in {:?}", event, rest);
                let Some(next) = next else { continue };
                match event {
                    RestEvent::ToSleep => asked = Some("sleep"),
                    RestEvent::ToWake => asked = Some("wake"),
                    RestEvent::Slept { .. } | RestEvent::FoundAsleep { .. } => (has_memory, asked) = (false, None),
                    RestEvent::Woke | RestEvent::ProcessGone => (has_memory, asked) = (true, None),
                    RestEvent::SleepRefused | RestEvent::WakeRefused => asked = None,
                }
                rest = next;
                prop_assert_eq!(rest.asleep_since().is_some(), !has_memory && asked.is_none());
            }
        }
    }
}
