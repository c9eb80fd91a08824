//! From values to places: scales, and the ticks that people can read.

use crate::table::{format_figure, format_ns};

/// What a value is, which decides how it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::report) enum Unit {
    /// Nanoseconds.
    Time,
    /// Bytes.
    Bytes,
    /// A share of 0 to 100.
    Percent,
    /// Anything else.
    Number,
}

impl Unit {
    /// The value as people read it.
    pub(in crate::report) fn format(self, value: f64) -> String {
        match self {
            Self::Time => format_ns(value),
            Self::Bytes => format_bytes(value),
            Self::Percent => format!("{} %", format_figure(value)),
            Self::Number => format_figure(value),
        }
    }

    /// The same at a tick, which is a round number: no digits that say nothing.
    fn format_tick(self, value: f64) -> String {
        if value == 0.0 {
            return "0".to_owned();
        }
        let text = self.format(value);
        let (number, unit) = text.split_once(' ').map_or((text.as_str(), ""), |(number, unit)| (number, unit));
        let number = if number.contains('.') && !number.contains('e') {
            number.trim_end_matches('0').trim_end_matches('.')
        } else {
            number
        };
        if unit.is_empty() { number.to_owned() } else { format!("{number} {unit}") }
    }
}

/// A size with three digits: `14.2 MiB`.
fn format_bytes(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value.abs() >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}", format_figure(value), UNITS[unit])
}

/// One direction of a plot.
#[derive(Clone, Debug)]
pub(in crate::report) struct Axis {
    /// What it shows.
    pub(in crate::report) label: String,
    /// What its values are.
    pub(in crate::report) unit: Unit,
    /// Whether equal ratios, and not equal differences, are equally far apart.
    pub(in crate::report) is_log: bool,
    /// Whether zero belongs to it.
    pub(in crate::report) from_zero: bool,
    /// Where its ticks are, if not at round values.
    pub(in crate::report) at: Vec<f64>,
}

impl Axis {
    pub(in crate::report) fn linear(label: &str, unit: Unit) -> Self {
        Self { label: label.to_owned(), unit, is_log: false, from_zero: true, at: Vec::new() }
    }

    pub(in crate::report) fn log(label: &str, unit: Unit) -> Self {
        Self { label: label.to_owned(), unit, is_log: true, from_zero: false, at: Vec::new() }
    }

    pub(in crate::report) fn around(label: &str, unit: Unit) -> Self {
        Self { label: label.to_owned(), unit, is_log: false, from_zero: false, at: Vec::new() }
    }
}

/// An axis with its ends, on so many units of the picture.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
    start: f64,
    length: f64,
}

impl Scale {
    /// From `start` on, `length` long; a negative length goes up. `None` without a value that can be shown.
    pub(super) fn fit(axis: &Axis, values: impl Iterator<Item = f64>, start: f64, length: f64) -> Option<Self> {
        let shown = values.filter(|value| value.is_finite() && (!axis.is_log || *value > 0.0));
        let (mut low, mut high) = shown.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        if low > high {
            return None;
        }
        if axis.from_zero {
            (low, high) = (low.min(0.0), high.max(0.0));
        }
        if axis.is_log {
            // At least a factor of two, so that equal values are not at the edge.
            if high / low < 2.0 {
                (low, high) = (low / 1.4, high * 1.4);
            } else {
                let margin = (high / low).powf(0.04);
                (low, high) = (low / margin, high * margin);
            }
        } else {
            let step = step(axis.unit, high - low);
            if high - low < f64::MIN_POSITIVE {
                (low, high) = (low - step, high + step);
            } else {
                (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
            }
        }
        Some(Self { low, high, is_log: axis.is_log, start, length })
    }

    /// Where a value is. Values that cannot be shown are at the lower end.
    pub(super) fn place(&self, value: f64) -> f64 {
        let share = if self.is_log {
            if value <= self.low { 0.0 } else { (value / self.low).ln() / (self.high / self.low).ln() }
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.start + self.length * if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Round values, each with its place and its name.
    pub(super) fn ticks(&self, axis: &Axis) -> Vec<(f64, String)> {
        let values = match (&axis.at[..], self.is_log) {
            ([], true) => self.log_ticks(),
            ([], false) => self.linear_ticks(axis.unit),
            (chosen, _) => chosen.to_vec(),
        };
        values.into_iter().map(|value| (self.place(value), axis.unit.format_tick(value))).collect()
    }

    fn linear_ticks(&self, unit: Unit) -> Vec<f64> {
        let step = step(unit, self.high - self.low);
        let first = (self.low / step).ceil();
        let ticks = (0..20).map(|i| (first + f64::from(i)) * step).take_while(|tick| *tick <= self.high + step * 1e-6);
        // -0 is written with its sign.
        ticks.map(|tick| if tick.abs() < step * 1e-6 { 0.0 } else { tick }).collect()
    }

    fn log_ticks(&self) -> Vec<f64> {
        let decades = (self.high / self.low).log10();
        // Few decades have room for what lies between powers of ten, many have no room for all of those.
        let factors: &[f64] = if decades <= 1.2 {
            &[1.0, 2.0, 3.0, 5.0, 7.0]
        } else if decades <= 2.2 {
            &[1.0, 2.0, 5.0]
        } else {
            &[1.0]
        };
        let every = if decades > 8.0 { 2 } else { 1 };
        let first = whole(self.low.log10().floor());
        let powers = (first..).step_by(every).map(|power| 10f64.powi(power));
        let ticks = powers
            .take_while(|power| *power <= self.high)
            .take(40)
            .flat_map(|power| factors.iter().map(move |f| f * power));
        ticks.filter(|tick| (self.low * 0.999..=self.high * 1.001).contains(tick)).collect()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "an exponent of a finite number is at most 308")]
const fn whole(exponent: f64) -> i32 {
    exponent as i32
}

/// The distance of round ticks: about five of them, in steps of 1, 2 or 5; of bytes, in powers of two.
fn step(unit: Unit, span: f64) -> f64 {
    let rough = if span > 0.0 && span.is_finite() { span / 5.0 } else { 1.0 };
    if unit == Unit::Bytes {
        return 2f64.powf(rough.log2().ceil()).max(1.0);
    }
    let power = 10f64.powf(rough.log10().floor());
    let factor = rough / power;
    power
        * if factor <= 1.0 {
            1.0
        } else if factor <= 2.0 {
            2.0
        } else if factor <= 5.0 {
            5.0
        } else {
            10.0
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(axis: &Axis, values: &[f64]) -> Vec<String> {
        let scale = Scale::fit(axis, values.iter().copied(), 0.0, 100.0).unwrap();
        scale.ticks(axis).into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(names(&Axis::linear("x", Unit::Number), &[3.0, 97.0]), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(
            names(&Axis::linear("x", Unit::Bytes), &[0.0, 3.0 * f64::from(1 << 30)]),
            ["0", "1 GiB", "2 GiB", "3 GiB"]
        );
        assert_eq!(names(&Axis::log("x", Unit::Time), &[1e3, 1e6]), ["1 us", "10 us", "100 us", "1 ms"]);
        assert_eq!(
            names(&Axis::log("x", Unit::Time), &[1e3, 5e4]),
            ["1 us", "2 us", "5 us", "10 us", "20 us", "50 us"]
        );
        assert_eq!(names(&Axis::around("x", Unit::Number), &[0.971, 1.029]), ["0.96", "0.98", "1", "1.02", "1.04"]);
    }

    #[test]
    fn equal_values_are_in_the_middle() {
        for axis in [Axis::log("x", Unit::Time), Axis::around("x", Unit::Number)] {
            let scale = Scale::fit(&axis, [5.0, 5.0].into_iter(), 0.0, 100.0).unwrap();
            assert!((scale.place(5.0) - 50.0).abs() < 1.0);
        }
        assert!(Scale::fit(&Axis::log("x", Unit::Time), [0.0, f64::NAN].into_iter(), 0.0, 1.0).is_none());
    }

    proptest! {
        #[test]
        fn whatever_is_shown_is_inside(values in prop::collection::vec(prop::num::f64::ANY, 1..20), is_log: bool, zero: bool) {
            let axis = Axis { label: String::new(), unit: Unit::Number, is_log, from_zero: zero && !is_log, at: Vec::new() };
            if let Some(scale) = Scale::fit(&axis, values.iter().copied(), 10.0, 100.0) {
                for value in values {
                    prop_assert!((10.0..=110.0).contains(&scale.place(value)));
                }
                for (place, _) in scale.ticks(&axis) {
                    prop_assert!((10.0..=110.0).contains(&place));
                }
            }
        }
    }
}
