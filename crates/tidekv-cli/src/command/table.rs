//! Pools as rows: the one way in which `list`, `watch` and `kvtop --once` print them.
//!
//! ```text
//!   IPC                             Limit         Used      %   State      PID       Held      Idle     ...
//!   kvcached_vLLM_4711           20.00 GB      4.00 GB  20.0 %  live       4711      5.00 GB   1.00 GB  ...
//!   `---------------- as kvcached prints it ---------------'  `------ ours, as far as the terminal is wide
//! ```

use std::cell::OnceCell;

use tidekv_core::share::Standing;
use tidekv_core::units::Bytes;

use crate::change::Change;
use crate::console::{Colour, Console};
use crate::scene::{Place, Pool};
use crate::text::{compact_size, cut_middle, fit, kvcached_percent, kvcached_size, printable, width};

/// A pool and, where it was looked at before, what changed since.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) pool: &'a Pool,
    pub(super) change: Option<&'a Change>,
}

impl<'a> From<&'a Pool> for Row<'a> {
    fn from(pool: &'a Pool) -> Self {
        Self { pool, change: None }
    }
}

/// A column of ours: its title and what stands in it. All but the last are padded to their width.
pub(super) struct Column {
    title: &'static str,
    width: usize,
    text: fn(&Row<'_>) -> String,
}

const STATE: Column = Column { title: "State", width: 9, text: |row| row.pool.state().word().to_owned() };
const PID: Column = Column { title: "PID", width: 8, text: |row| place(row, |place| place.entry.pid.to_string()) };
const HELD: Column = Column { title: "Held", width: 11, text: |row| size(row, |place| place.entry.reserved) };
const NEEDED: Column = Column { title: "Needed", width: 11, text: |row| size(row, |place| place.usage().needed) };
const CACHED: Column = Column { title: "Cached", width: 11, text: |row| size(row, |place| place.usage().cached) };
const IDLE: Column = Column { title: "Idle", width: 11, text: |row| size(row, |place| place.usage().idle) };
const DEMAND: Column = Column { title: "Demand", width: 11, text: |row| size(row, |place| place.entry.demand) };
const SHARE: Column = Column { title: "Share", width: 11, text: |row| size(row, |place| place.fair) };
const DEVICE: Column = Column { title: "Device", width: 4, text: |row| place(row, |place| place.device.to_string()) };
const MORE_USED: Column = Column { title: "+Used", width: 7, text: |row| more(row, |change| change.used_bytes) };
const MORE_HELD: Column = Column { title: "+Held", width: 7, text: |row| more(row, |change| change.held_bytes) };
const MAPS: Column =
    Column { title: "Maps/s", width: 6, text: |row| rate(row.change.and_then(|c| Some(c.rates?.maps))) };
const UNMAPS: Column =
    Column { title: "Unmaps/s", width: 8, text: |row| rate(row.change.and_then(|c| Some(c.rates?.unmaps))) };

/// How things stand, the most telling first: columns go from the right when the terminal is narrow.
pub(super) const STANDING: &[Column] = &[STATE, PID, HELD, NEEDED, CACHED, IDLE, DEMAND, SHARE, DEVICE];
/// The same for those who look again and again: what changes comes first.
pub(super) const CHANGING: &[Column] =
    &[MORE_USED, MAPS, UNMAPS, MORE_HELD, STATE, PID, HELD, NEEDED, CACHED, IDLE, DEMAND, SHARE, DEVICE];

/// Rows and the columns that fit.
pub(super) struct Table<'a> {
    rows: Vec<Row<'a>>,
    columns: &'static [Column],
    name_width: usize,
    cut_names: bool,
    room: Option<usize>,
    fits: OnceCell<usize>,
}

/// kvcached's width of the first column.
const NAME_WIDTH: usize = 24;

impl<'a> Table<'a> {
    /// A table of these rows for a terminal of `room` columns; without a terminal all columns are printed.
    pub(super) fn new(rows: Vec<Row<'a>>, columns: &'static [Column], room: Option<usize>) -> Self {
        Self { rows, columns, name_width: NAME_WIDTH, cut_names: false, room, fits: OnceCell::new() }
    }

    /// For a screen: names get what the longest needs, so that more columns fit, but never what kvcached's other columns
    /// and three of ours need.
    pub(super) fn with_cut_names(mut self) -> Self {
        const OTHERS: usize = 34 + 9 + 8 + 10;
        let longest = self.rows.iter().map(|row| width(&printable(&row.pool.name))).max().unwrap_or(0);
        let most = self.room.unwrap_or(0).saturating_sub(OTHERS).max(NAME_WIDTH / 2);
        self.name_width = longest.clamp("IPC".len(), most);
        self.cut_names = true;
        self
    }

    /// All of it.
    pub(super) fn print(&self, console: &mut Console) -> anyhow::Result<()> {
        console.line(console.paint(&self.header(), Colour::BoldCyan))?;
        for (line, colour) in self.lines() {
            console.line(console.paint(&line, colour))?;
        }
        for why in self.rows.iter().filter_map(|row| row.pool.place.as_ref()?.why.as_deref()) {
            console.line(printable(why))?;
        }
        Ok(())
    }

    /// The titles.
    pub(super) fn header(&self) -> String {
        let theirs = format!("{} {:>12} {:>12} {:>6}", fit("IPC", self.name_width), "Limit", "Used", "%");
        let ours = self.ours(|column| column.title.to_owned());
        format!("{theirs} {ours}").trim_end().to_owned()
    }

    /// A line for each row, and its colour.
    pub(super) fn lines(&self) -> impl Iterator<Item = (String, Colour)> {
        self.rows.iter().map(|row| {
            let line = format!("{}{}", self.theirs(row.pool), self.ours(|column| (column.text)(row)));
            (line.trim_end().to_owned(), Pressure::of_pool(row.pool).colour())
        })
    }

    fn ours(&self, cell: impl Fn(&Column) -> String) -> String {
        let fits = *self.fits.get_or_init(|| self.fitting_columns());
        let columns = self.columns[..fits].iter();
        columns.map(|column| format!("  {:<width$}", cell(column), width = column.width)).collect()
    }

    /// A row as kvcached prints it.
    fn theirs(&self, pool: &Pool) -> String {
        let (limit, used) = (pool.limit(), pool.used());
        let name = printable(&pool.name);
        let name = if self.cut_names { cut_middle(&name, self.name_width) } else { name.as_ref().into() };
        let name = if width(&name) < self.name_width { fit(&name, self.name_width).into() } else { name };
        let percent = kvcached_percent(used, limit);
        format!("{name} {:>12} {:>12} {percent:>5} %", kvcached_size(limit), kvcached_size(used))
    }

    /// How many of our columns the terminal has room for. Without a terminal all of them.
    fn fitting_columns(&self) -> usize {
        let Some(room) = self.room else { return self.columns.len() };
        let widest =
            |text: &dyn Fn(&Row<'_>) -> String| self.rows.iter().map(|row| width(&text(row))).max().unwrap_or(0);
        let mut used = widest(&|row| self.theirs(row.pool));
        let fitting = self.columns.iter().take_while(|column| {
            used += 2 + column.width.max(widest(&|row| (column.text)(row)));
            used <= room
        });
        fitting.count()
    }
}

fn place(row: &Row<'_>, text: impl Fn(&Place) -> String) -> String {
    row.pool.place.as_ref().map_or_else(|| "-".to_owned(), text)
}

fn size(row: &Row<'_>, bytes: impl Fn(&Place) -> Bytes) -> String {
    place(row, |place| kvcached_size(i64::try_from(bytes(place).0).unwrap_or(i64::MAX)))
}

fn more(row: &Row<'_>, bytes: impl Fn(&Change) -> i128) -> String {
    row.change.map_or_else(|| "-".to_owned(), |change| signed_size(bytes(change)))
}

/// A difference of sizes: `+1.5G`, `-20.0M`, `0`.
pub(super) fn signed_size(bytes: i128) -> String {
    let size = compact_size(u64::try_from(bytes.unsigned_abs()).unwrap_or(u64::MAX));
    match bytes.signum() {
        1 => format!("+{size}"),
        -1 => format!("-{size}"),
        _ => "0".to_owned(),
    }
}

/// A rate in at most five columns: `0`, `0.5`, `12`, `12.3k`; `-` where there is none.
pub(super) fn rate(per_second: Option<f64>) -> String {
    match per_second {
        None => "-".to_owned(),
        Some(rate) if rate == 0.0 || (9.95..9999.5).contains(&rate) => format!("{rate:.0}"),
        Some(rate) if rate < 9.95 => format!("{rate:.1}"),
        Some(rate) if rate < 999_950.0 => format!("{:.1}k", rate / 1e3),
        Some(rate) if rate < 999_950_000.0 => format!("{:.1}M", rate / 1e6),
        Some(_) => "lots".to_owned(),
    }
}

/// What a pool's colour says: how it stands against its share, or, where that is as it should be and for pools of kvcached's own, how
/// close it is to its limit, as kvcached's tools colour it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pressure {
    /// Below half.
    Low,
    /// From half on, or above its share, or a limit of 0.
    Middle,
    /// From 80 % on, or it waits.
    High,
}

impl Pressure {
    pub(super) fn of(used: i64, limit: i64) -> Self {
        let (used, limit) = (i128::from(used), i128::from(limit));
        match () {
            () if limit == 0 && used == 0 => Self::Middle,
            () if used * 100 < limit * 50 => Self::Low,
            () if used * 100 < limit * 80 => Self::Middle,
            () => Self::High,
        }
    }

    pub(super) fn of_pool(pool: &Pool) -> Self {
        let by_limit = Self::of(pool.used(), pool.limit());
        pool.live_place().map_or(by_limit, |place| by_limit.max(Self::of_standing(place.standing)))
    }

    pub(super) fn of_standing(standing: Standing) -> Self {
        match standing {
            Standing::Within => Self::Low,
            Standing::Above | Standing::Gives => Self::Middle,
            Standing::Waits => Self::High,
        }
    }

    /// The same for sizes that are not words of a segment.
    pub(super) fn of_bytes(used: Bytes, limit: Bytes) -> Self {
        let [used, limit] = [used, limit].map(|bytes| i64::try_from(bytes.0).unwrap_or(i64::MAX));
        Self::of(used, limit)
    }

    fn colour(self) -> Colour {
        match self {
            Self::Low => Colour::Green,
            Self::Middle => Colour::Yellow,
            Self::High => Colour::Red,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::{self, Write};
    use std::rc::Rc;

    use tidekv_shm::SegmentView;

    use super::*;
    use crate::change::Rates;

    #[derive(Clone, Default)]
    struct Buffer(Rc<RefCell<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.borrow_mut().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn printed(pools: &[Pool], colour: bool, width: Option<usize>) -> String {
        let out = Buffer::default();
        let mut console = Console::to(out.clone(), io::sink(), colour, width);
        Table::new(pools.iter().map(Row::from).collect(), STANDING, width).print(&mut console).unwrap();
        String::from_utf8(out.0.take()).unwrap()
    }

    fn named(name: &str, limit: i64, used: i64) -> Pool {
        Pool { name: name.to_owned(), segment: Some(SegmentView { limit, used, prealloc: 0 }), place: None }
    }

    fn theirs(limit: i64, used: i64) -> Pool {
        named("theirs", limit, used)
    }

    #[test]
    fn colours_change_at_50_and_80_percent() {
        for (used, code) in [(0, "32"), (499, "32"), (500, "33"), (799, "33"), (800, "31"), (2000, "31")] {
            let text = printed(&[theirs(1000, used)], true, None);
            let row = text.lines().nth(1).unwrap();
            assert!(row.starts_with(&format!("\x1b[{code}mtheirs ")) && row.ends_with("\x1b[0m"), "{used}: {row:?}");
        }
        assert!(printed(&[theirs(1, 0)], true, None).starts_with("\x1b[1;36mIPC "));
        let paused = printed(&[theirs(0, 0)], true, None);
        assert!(paused.contains("\x1b[33mtheirs "), "a limit of 0 is not green: {paused:?}");
        assert!(printed(&[theirs(0, 1)], true, None).contains("\x1b[31mtheirs "), "above a limit of 0");
        assert_eq!(Pressure::of_standing(Standing::Waits), Pressure::High);
    }

    #[test]
    fn our_columns_go_from_the_right_when_the_terminal_is_narrow() {
        let header = |width| printed(&[theirs(1 << 30, 0)], false, width).lines().next().unwrap().to_owned();
        let kvcached = "IPC                             Limit         Used      %";
        assert_eq!(header(Some(60)), kvcached);
        assert_eq!(header(Some(70)), format!("{kvcached}   State"));
        assert_eq!(header(Some(80)), format!("{kvcached}   State      PID"));
        assert!(header(None).ends_with("Device") && header(Some(200)) == header(None));
        for width in [60, 70, 80, 100, 120, 200] {
            let text = printed(&[theirs(1 << 30, 0)], false, Some(width));
            assert!(text.lines().all(|line| line.len() <= width), "{width}:\n{text}");
        }
    }

    #[test]
    fn long_names_are_whole_in_a_list_and_cut_on_a_screen() {
        let pools = [named(&"x".repeat(100), 1 << 30, 0), named("short", 1 << 30, 0)];
        assert!(printed(&pools, false, Some(80)).contains(&"x".repeat(100)));
        let rows = || pools.iter().map(Row::from).collect();
        for (room, head, tail) in [(40, 6, 5), (80, 9, 9), (120, 29, 29), (200, 100, 0)] {
            let table = Table::new(rows(), CHANGING, Some(room)).with_cut_names();
            let lines: Vec<String> = table.lines().map(|(line, _)| line).collect();
            let name =
                if tail == 0 { "x".repeat(head) } else { format!("{}…{}", "x".repeat(head), "x".repeat(tail)) };
            assert!(lines[0].starts_with(&format!("{name}  ")), "{room}: {lines:?}");
            assert_eq!(lines[0].chars().position(|c| c == 'G'), lines[1].chars().position(|c| c == 'G'), "{lines:?}");
        }
    }

    #[test]
    fn columns_stay_below_each_other_whatever_the_name() {
        let pools = ["plain", "模型缓存", "cafe\u{301}", "evil\x1b[2J"].map(|name| named(name, 1 << 30, 0));
        let text = printed(&pools, false, Some(80));
        let ends: Vec<usize> = text.lines().skip(1).map(|line| width(&line[..line.find("GB").unwrap()])).collect();
        assert_eq!(ends, [ends[0]; 4], "{text}");
        assert!(text.contains("evil\\u001b[2J ") && !text.contains('\x1b'), "{text}");
    }

    #[test]
    fn changes_come_first_for_those_who_look_again() {
        let pool = named("kvcached_vLLM_4711", 1 << 30, 1 << 20);
        let change = Change { used_bytes: -(3 << 29), held_bytes: 0, rates: Some(Rates { maps: 12.34, unmaps: 0.5 }) };
        let table = Table::new(vec![Row { pool: &pool, change: Some(&change) }], CHANGING, Some(80));
        let table = table.with_cut_names();
        assert_eq!(table.header(), "IPC                       Limit         Used      %   +Used    Maps/s  Unmaps/s");
        let line = table.lines().next().unwrap().0;
        assert_eq!(line, "kvcached_vLLM_4711      1.00 GB      1.00 MB   0.1 %  -1.5G    12      0.5");
    }

    #[test]
    fn figures_that_change_are_short() {
        assert_eq!([signed_size(0), signed_size(3 << 29), signed_size(-1)], ["0", "+1.5G", "-1B"]);
        for (per_second, text) in [
            (0.0, "0"),
            (0.04, "0.0"),
            (9.94, "9.9"),
            (9.96, "10"),
            (9999.0, "9999"),
            (12_345.0, "12.3k"),
            (1e12, "lots"),
        ] {
            assert_eq!(rate(Some(per_second)), text);
            assert!(text.len() <= 5);
        }
        assert_eq!(rate(None), "-");
    }
}
