//! Which method for which block: a table of two rows, and the text that keeps it between runs.
//!
//! ```text
//!   tidekv copy profile 1                  refused where another version stands here
//!   processor AMD EPYC 9654
//!   cpus 2                                 processors that this process may use
//!   read_soon 4096 memcpy -                one thread: memcpy; more threads are no faster
//!   cold 16777216 nt nt                    one thread: nt; all of them: nt, and faster
//!   ...
//!   crc32c 8f3a01c2                        of all lines above
//! ```
//!
//! A text that deviates in anything is no profile: it is measured again, which costs less than half a second.

use std::fmt::Write;

use super::Method;

/// Block sizes that are measured. A block of another size is treated as the nearest of these.
pub(super) const CLASSES: [usize; 8] = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];

/// From here on several threads are tried.
pub(super) const MIN_SHARED_BYTES: usize = 256 << 10;

/// Below this a block is copied plainly: a look into the table costs more than it gains.
const MIN_CHOSEN_BYTES: usize = 512;

/// From here on a block is cold, whoever reads it next: no cache holds two of them.
const MIN_COLD_BYTES: usize = 32 << 20;

/// The version of the text, and of what its lines mean.
const VERSION: u32 = 1;

/// What happens to the copy next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// A processor of this machine reads it at once: it should be in a cache.
    ReadSoon,
    /// Nobody here reads it soon: a device does, another process later, or it is kept for later.
    Cold,
}

impl Destination {
    /// Both.
    pub const ALL: [Self; 2] = [Self::ReadSoon, Self::Cold];

    const fn name(self) -> &'static str {
        match self {
            Self::ReadSoon => "read_soon",
            Self::Cold => "cold",
        }
    }
}

/// How blocks of one size are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// By one thread.
    pub(super) alone: Method,
    /// By all threads, where that is faster than one.
    pub(super) together: Option<Method>,
}

/// The fastest method by size and by what happens next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    read_soon: [Choice; CLASSES.len()],
    cold: [Choice; CLASSES.len()],
}

impl Profile {
    /// What holds on most processors, without measuring: past the caches if nobody reads it soon.
    pub fn assumed() -> Self {
        let far = if Method::NonTemporal.is_available() { Method::NonTemporal } else { Method::Plain };
        let choice = |alone| Choice { alone, together: None };
        let cold = CLASSES.map(|class| choice(if class >= 16 << 10 { far } else { Method::Plain }));
        Self { read_soon: CLASSES.map(|_| choice(Method::Plain)), cold }
    }

    /// One method for every block, whatever its size, and never more than one thread.
    pub fn always(method: Method) -> Self {
        let choices = CLASSES.map(|_| Choice { alone: method, together: None });
        Self { read_soon: choices, cold: choices }
    }

    /// A table of choices by class.
    pub(super) fn of(choice: impl Fn(Destination, usize) -> Choice) -> Self {
        let row = |destination| CLASSES.map(|class| choice(destination, class));
        Self { read_soon: row(Destination::ReadSoon), cold: row(Destination::Cold) }
    }

    fn row(&self, destination: Destination) -> &[Choice; CLASSES.len()] {
        match destination {
            Destination::ReadSoon => &self.read_soon,
            Destination::Cold => &self.cold,
        }
    }

    /// The method for a block, and whether all threads copy it.
    pub fn choose(&self, destination: Destination, len: usize, threads: usize) -> (Method, bool) {
        if len < MIN_CHOSEN_BYTES {
            return (Method::Plain, false);
        }
        let destination = if len >= MIN_COLD_BYTES { Destination::Cold } else { destination };
        let choice = self.row(destination)[class_of(len)];
        match choice.together {
            Some(method) if threads > 1 && len >= MIN_SHARED_BYTES => (method, true),
            _ => (choice.alone, false),
        }
    }

    /// The text, for a machine that is known by `key`.
    pub(super) fn to_text(&self, key: &MachineKey) -> String {
        let mut text = format!("tidekv copy profile {VERSION}\nprocessor {}\ncpus {}\n", key.processor, key.cpus);
        for destination in Destination::ALL {
            for (class, choice) in CLASSES.iter().zip(self.row(destination)) {
                let together = choice.together.map_or("-", Method::name);
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{} {class} {} {together}", destination.name(), choice.alone.name());
            }
        }
        let sum = super::crc32c(text.as_bytes());
        text + &format!("crc32c {sum:08x}\n")
    }

    /// The profile that `text` is for this machine; `None` if it is anything else.
    pub(super) fn from_text(text: &str, key: &MachineKey) -> Option<Self> {
        let profile = Self::parse(text)?;
        // Writing it again is the strictest of all comparisons.
        (profile.to_text(key) == text).then_some(profile)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines().skip(3);
        let mut profile = Self::assumed();
        for destination in Destination::ALL {
            for class in 0..CLASSES.len() {
                let mut words = lines.next()?.split(' ').skip(2);
                let (alone, together) = (words.next()?, words.next()?);
                let usable = |name| Method::from_name(name).filter(|method| method.is_available());
                let choice = Choice {
                    alone: usable(alone)?,
                    together: if together == "-" { None } else { Some(usable(together)?) },
                };
                match destination {
                    Destination::ReadSoon => profile.read_soon[class] = choice,
                    Destination::Cold => profile.cold[class] = choice,
                }
            }
        }
        Some(profile)
    }
}

/// Index of the class that is nearest to `len`.
fn class_of(len: usize) -> usize {
    CLASSES.iter().position(|&class| len < 2 * class).unwrap_or(CLASSES.len() - 1)
}

/// What a profile is valid for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MachineKey {
    /// Model name of the processor, in one line.
    pub(super) processor: String,
    /// Processors that this process may use.
    pub(super) cpus: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key() -> MachineKey {
        MachineKey { processor: "Some Processor @ 2.60GHz".to_owned(), cpus: 2 }
    }

    fn mixed() -> Profile {
        let methods: Vec<Method> = Method::available().collect();
        let method = |n: usize| methods[n % methods.len()];
        Profile::of(|destination, class| Choice {
            alone: method(class.trailing_zeros() as usize / 2),
            together: (destination == Destination::Cold && class >= MIN_SHARED_BYTES).then(|| method(1)),
        })
    }

    #[test]
    fn the_nearest_class_is_chosen() {
        for (len, class) in
            [(1, 0), (2047, 0), (2048, 1), (4096, 1), (8192, 2), (16384, 2), (1 << 20, 5), (16 << 20, 7), (1 << 40, 7)]
        {
            assert_eq!(class_of(len), class, "{len}");
        }
    }

    #[test]
    fn small_blocks_and_single_threads_are_left_alone() {
        let far = Profile::of(|_, _| Choice { alone: Method::Plain, together: Some(Method::Plain) });
        assert_eq!(far.choose(Destination::Cold, 100, 8), (Method::Plain, false));
        assert_eq!(far.choose(Destination::Cold, 1 << 20, 1), (Method::Plain, false));
        assert_eq!(far.choose(Destination::Cold, 1 << 20, 2), (Method::Plain, true));
        assert_eq!(far.choose(Destination::Cold, MIN_SHARED_BYTES - 1, 2), (Method::Plain, false));
    }

    #[test]
    fn no_cache_holds_a_huge_block() {
        let far = if Method::NonTemporal.is_available() { Method::NonTemporal } else { Method::Plain };
        let profile = Profile::of(|destination, _| Choice {
            alone: if destination == Destination::Cold { far } else { Method::Plain },
            together: None,
        });
        assert_eq!(profile.choose(Destination::ReadSoon, 16 << 20, 1), (Method::Plain, false));
        assert_eq!(profile.choose(Destination::ReadSoon, 64 << 20, 1), (far, false));
    }

    #[test]
    fn a_profile_survives_its_text_and_belongs_to_its_machine() {
        let (profile, key) = (mixed(), key());
        let text = profile.to_text(&key);
        assert_eq!(Profile::from_text(&text, &key), Some(profile));
        assert_eq!(Profile::from_text(&text, &MachineKey { cpus: 3, ..key.clone() }), None);
        assert_eq!(Profile::from_text(&text, &MachineKey { processor: "another".into(), ..key.clone() }), None);
        assert_eq!(Profile::from_text(&text.replacen("profile 1", "profile 2", 1), &key), None);
        assert_eq!(Profile::from_text("", &key), None);
    }

    proptest! {
        #[test]
        fn damage_is_always_noticed(at in 0..600usize, byte in any::<u8>()) {
            let text = mixed().to_text(&key());
            let mut bytes = text.clone().into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(damaged) = String::from_utf8(bytes) && damaged != text {
                prop_assert_eq!(Profile::from_text(&damaged, &key()), None);
            }
        }

        #[test]
        fn no_text_panics(text: String) {
            let _ = Profile::from_text(&text, &key());
        }
    }
}
