//! Times in flags and in files.

use std::fmt;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use tidekv_cli::text::parse_duration;

/// A time as people write it: `90`, `90s`, `1.5m`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seconds(pub Duration);

impl std::str::FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse_duration(text).map(Self).map_err(|error| error.to_string())
    }
}

impl Seconds {
    fn of(seconds: f64) -> Result<Self, String> {
        Duration::try_from_secs_f64(seconds).map(Self).map_err(|error| format!("{seconds} s: {error}"))
    }
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl Visitor<'_> for Either {
            type Value = Seconds;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time, such as 90s")
            }

            fn visit_f64<E: de::Error>(self, seconds: f64) -> Result<Seconds, E> {
                Seconds::of(seconds).map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, seconds: u64) -> Result<Seconds, E> {
                Ok(Seconds(Duration::from_secs(seconds)))
            }

            fn visit_i64<E: de::Error>(self, seconds: i64) -> Result<Seconds, E> {
                u64::try_from(seconds).map_err(E::custom).and_then(|seconds| self.visit_u64(seconds))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Seconds, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Either)
    }
}
