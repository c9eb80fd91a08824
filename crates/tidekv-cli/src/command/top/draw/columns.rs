//! Which columns the table of pools has at a width, and how wide each is.
//!
//! ```text
//!   >name         D  state      [##==----|---]   used/limit     %  map/unmap  history  Demand  Share  ...
//!    flexible     only with     flexible                                      flexible `-- extras, from 80 columns on
//!                 several devices
//! ```
//!
//! Beyond 80 columns two thirds of the room go to extra columns, the most telling first, and the rest to names, bars and
//! histories.

use tidekv_core::units::Bytes;

use crate::command::top::state::Track;
use crate::text::compact_size;

/// Widths that do not change.
pub(super) const STATE: usize = 9;
pub(super) const USED: usize = 11;
pub(super) const PERCENT: usize = 5;
pub(super) const RATES: usize = 9;
pub(super) const DEVICE: usize = 2;
const CURSOR: usize = 1;

/// Least widths of those that do.
const NAME: usize = 10;
/// What names may have beyond that before bars and histories get anything.
const NAME_SURPLUS: usize = 10;
const BAR: usize = 14;
const SPARK: usize = 6;

/// The width from which on extra columns appear.
const EXTRAS_FROM: usize = 80;

/// A column that only wide screens have.
#[derive(Debug)]
pub(super) struct Extra {
    pub(super) title: &'static str,
    pub(super) width: usize,
    pub(super) text: fn(&Track) -> String,
}

/// The most telling first.
static EXTRAS: [Extra; 8] = [
    Extra { title: "Demand", width: 6, text: |track| of_ledger(track, |place| size(place.demand)) },
    Extra { title: "Share", width: 6, text: |track| of_ledger(track, |place| size(place.fair)) },
    Extra { title: "Held", width: 6, text: |track| size(track.pool.held()) },
    Extra { title: "Idle", width: 6, text: |track| size(track.pool.idle) },
    Extra { title: "PID", width: 7, text: |track| of_ledger(track, |place| place.pid.to_string()) },
    Extra { title: "Owes", width: 6, text: |track| of_ledger(track, |place| size(place.owed)) },
    Extra { title: "Weight", width: 6, text: |track| of_ledger(track, |place| place.weight.to_string()) },
    Extra { title: "Device", width: 12, text: |track| of_ledger(track, |place| place.device.to_string()) },
];

fn of_ledger(track: &Track, text: impl Fn(&crate::command::top::collect::PlaceSample) -> String) -> String {
    track.pool.place.as_ref().map_or_else(|| "-".to_owned(), text)
}

fn size(bytes: Bytes) -> String {
    compact_size(bytes.0)
}

/// The columns of a table.
#[derive(Debug)]
pub(super) struct Columns {
    pub(super) name: usize,
    pub(super) bar: usize,
    pub(super) spark: usize,
    pub(super) has_device: bool,
    pub(super) extras: &'static [Extra],
}

impl Columns {
    /// For a table so wide, with names of at most so many columns.
    pub(super) fn new(width: usize, longest_name: usize, has_device: bool) -> Self {
        let mut for_extras = width.saturating_sub(EXTRAS_FROM) * 2 / 3;
        let fitting = EXTRAS.iter().take_while(|extra| {
            let fits = for_extras > extra.width;
            for_extras = for_extras.saturating_sub(extra.width + 1);
            fits
        });
        let extras = &EXTRAS[..fitting.count()];

        let device = if has_device { DEVICE + 1 } else { 0 };
        let extra_width: usize = extras.iter().map(|extra| extra.width + 1).sum();
        // Each column but the cursor and the name has a blank before it.
        let fixed = CURSOR + device + (1 + STATE) + 1 + (1 + USED) + (1 + PERCENT) + (1 + RATES) + 1 + extra_width;
        let surplus = width.saturating_sub(fixed + NAME + BAR + SPARK);
        // Names tell pools apart, so they come first; but a very long one leaves half to the others.
        let for_name = surplus.min(NAME_SURPLUS).max(surplus / 2);
        let name = longest_name.clamp(NAME, NAME + for_name);
        let rest = surplus - (name - NAME);
        let bar = rest * 2 / 3;
        Self { name, bar: BAR + bar, spark: SPARK + rest - bar, has_device, extras }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn width_of(columns: &Columns) -> usize {
        let device = if columns.has_device { DEVICE + 1 } else { 0 };
        let extras: usize = columns.extras.iter().map(|extra| extra.width + 1).sum();
        let fixed = CURSOR + device + STATE + USED + PERCENT + RATES + 6;
        fixed + extras + columns.name + columns.bar + columns.spark
    }

    #[test]
    fn from_80_columns_on_the_whole_width_is_used() {
        for width in 80..400 {
            for longest in [3, 18, 76, 500] {
                for has_device in [false, true] {
                    let columns = Columns::new(width, longest, has_device);
                    assert_eq!(width_of(&columns), width, "{width} {longest} {columns:?}");
                }
            }
        }
    }

    #[test]
    fn wider_screens_show_more() {
        let titles = |width| Columns::new(width, 18, false).extras.iter().map(|extra| extra.title).collect::<Vec<_>>();
        assert!(titles(80).is_empty());
        assert_eq!(titles(120), ["Demand", "Share", "Held"]);
        assert_eq!(titles(200).len(), 8);
        let [narrow, middle, wide] = [80, 120, 200].map(|width| Columns::new(width, 18, false));
        assert!(narrow.bar < middle.bar && middle.bar < wide.bar);
        assert!(narrow.spark < middle.spark && middle.spark < wide.spark);
        assert!([narrow.name, middle.name, wide.name] == [18; 3], "the whole name");
    }
}
