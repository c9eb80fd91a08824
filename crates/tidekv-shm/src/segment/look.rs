//! Finding segments among everything else that lies in a shared folder, again and again.
//!
//! ```text
//!   readdir + fstatat            every file, every time
//!   open, read, close            files of 24 bytes that may be a pool's, and those that have changed
//! ```
//!
//! Pools write their numbers through mappings too, which changes no time of the file. So what may be a pool is read each
//! time, and only a file that is none by its contents is passed over, for as long as its times stay what they were.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, Dir, DirEntry, FileType, Mode, OFlags, open, openat, statat};

use super::{SEGMENT_BYTES, SegmentView, read_bytes};
use crate::RuntimeDir;

/// A file is passed over only if it was left alone for this long before it was read. Two changes within one tick of the
/// clock have one time, and whoever makes a segment writes it right afterwards.
const SETTLED_S: i64 = 2;
/// No pool has a limit above this: such a number is text, or a fraction.
const LIMIT_MAX: i64 = 1 << 50;
/// How kvcached names its segments unless it is told otherwise.
const POOL_PREFIX: &str = "kvcached_";

/// The segments of a folder, for whoever looks more than once.
#[derive(Debug, Default)]
pub struct Segments {
    /// By device and inode.
    known: HashMap<(u64, u64), Known>,
    reads: u64,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    /// Of the last change of the contents, and of anything: seconds and nanoseconds each.
    times: [i64; 4],
    view: Option<SegmentView>,
    /// It has been a pool's, as far as one can see: it is read every time.
    pool: bool,
    /// It had been left alone when it was read.
    settled: bool,
}

impl Segments {
    /// All segments with their names, in the order of the names. What cannot be read is left out: the folder is
    /// everybody's. Takes no lock, so it can neither wait for a process that is stopped nor, stopped itself, make one wait.
    pub fn look(&mut self, dir: &RuntimeDir) -> Vec<(String, SegmentView)> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs().cast_signed());
        self.look_at(dir, now)
    }

    /// How many files were opened and read, in all looks.
    pub fn reads(&self) -> u64 {
        self.reads
    }

    fn look_at(&mut self, dir: &RuntimeDir, now_s: i64) -> Vec<(String, SegmentView)> {
        let before = std::mem::take(&mut self.known);
        let Ok(folder) = open(dir.path(), OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) else {
            return Vec::new();
        };
        let Ok(entries) = Dir::read_from(&folder) else { return Vec::new() };
        let mut found = Vec::new();
        for entry in entries.map_while(Result::ok) {
            let Some((name, known)) = self.file(folder.as_fd(), &entry, &before, now_s) else { continue };
            found.extend(known.view.map(|view| (name.to_owned(), view)));
        }
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
        found
    }

    /// One file of the folder, if it has a segment's size. The size first: most files of a shared folder are something
    /// else, and opening them would be noticed.
    fn file<'a>(
        &mut self,
        folder: BorrowedFd<'_>,
        entry: &'a DirEntry,
        before: &HashMap<(u64, u64), Known>,
        now_s: i64,
    ) -> Option<(&'a str, Known)> {
        if !matches!(entry.file_type(), FileType::RegularFile | FileType::Unknown) {
            return None;
        }
        let state = statat(folder, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let regular = FileType::from_raw_mode(state.st_mode) == FileType::RegularFile;
        if !regular || u64::try_from(state.st_size) != Ok(SEGMENT_BYTES as u64) {
            return None;
        }
        let name = entry.file_name().to_str().ok()?;
        let key = (state.st_dev, state.st_ino);
        let nanos = |nanos| i64::try_from(nanos).unwrap_or(i64::MAX);
        let times = [state.st_mtime, nanos(state.st_mtime_nsec), state.st_ctime, nanos(state.st_ctime_nsec)];
        let last = before.get(&key);
        let known = match last.filter(|last| !last.pool && last.settled && last.times == times) {
            Some(last) => *last,
            None => {
                self.reads += 1;
                let bytes = peek(folder, entry)?;
                let settled = state.st_mtime.max(state.st_ctime).saturating_add(SETTLED_S) <= now_s;
                let pool = last.is_some_and(|last| last.pool) || may_be_a_pool(name, SegmentView::decode(&bytes));
                Known { times, view: SegmentView::parse(&bytes), pool, settled }
            }
        };
        self.known.insert(key, known);
        Some((name, known))
    }
}

fn may_be_a_pool(name: &str, view: SegmentView) -> bool {
    let SegmentView { limit, used, prealloc } = view;
    let sums = (0..=LIMIT_MAX).contains(&limit) && used >= 0 && prealloc >= 0 && (limit, used, prealloc) != (0, 0, 0);
    sums || name.starts_with(POOL_PREFIX)
}

/// The bytes of a file that has a segment's size. 24 bytes in one call are as good as locked.
fn peek(folder: BorrowedFd<'_>, entry: &DirEntry) -> Option<[u8; SEGMENT_BYTES]> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = openat(folder, entry.file_name(), flags, Mode::empty()).ok()?;
    // One byte more than there may be, to see that there is not.
    let mut bytes = [0; SEGMENT_BYTES + 1];
    let length = read_bytes(file.as_fd(), &mut bytes).ok()?;
    bytes[..length].try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::time::Instant;

    use tidekv_core::units::Bytes;

    use super::*;
    use crate::Ledger;
    use crate::segment::write_new;

    fn folder() -> (tempfile::TempDir, RuntimeDir) {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let dir = RuntimeDir::at(folder.path());
        (folder, dir)
    }

    /// Contents that have a segment's size and are no pool's.
    fn foreign(at: u32) -> [u8; SEGMENT_BYTES] {
        let numbers = [1.5_f64, 2.0, f64::from(at)].map(f64::to_ne_bytes).concat();
        match at % 4 {
            0 => [0; SEGMENT_BYTES],
            1 => numbers.try_into().unwrap(),
            2 => *b"twenty-four letters long",
            _ => SegmentView { limit: -1, used: 5, prealloc: 7 }.to_bytes(),
        }
    }

    /// What any look costs: the names, and the state of each file.
    fn read_folder(path: &Path) -> i64 {
        let folder = open(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let size = |entry: DirEntry| statat(&folder, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW).unwrap().st_size;
        Dir::read_from(&folder).unwrap().map(|entry| size(entry.unwrap())).sum()
    }

    /// The median cost of a look, as a multiple of the floor beside which each was taken.
    fn ratio(path: &Path, mut look: impl FnMut()) -> f64 {
        let timed = |what: &mut dyn FnMut()| {
            let start = Instant::now();
            what();
            start.elapsed().as_secs_f64()
        };
        let mut ratios: Vec<f64> = (0..9)
            .map(|_| {
                let floor = timed(&mut || assert!(read_folder(path) > 0));
                timed(&mut look) / floor
            })
            .collect();
        ratios.sort_by(f64::total_cmp);
        ratios[ratios.len() / 2]
    }

    fn now_s() -> i64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().cast_signed()
    }

    /// Others may take the processor in the middle of a measurement, so it may be repeated.
    fn holds(what: &str, measure: impl Fn() -> f64) {
        let mut seen = Vec::new();
        while seen.len() < 8 && seen.iter().all(|ratio| *ratio > 2.0) {
            seen.push(measure());
        }
        assert!(seen.iter().any(|ratio| *ratio <= 2.0), "{what}: {seen:?} times the folder");
    }

    #[test]
    fn a_look_costs_at_most_twice_the_folder() {
        let (folder, dir) = folder();
        for at in 0..20_000 {
            let path = folder.path().join(format!("other_{at}"));
            // One in twenty has a segment's size.
            let bytes = if at % 20 == 0 { foreign(at / 20).to_vec() } else { format!("{at}").into_bytes() };
            fs::write(path, bytes).unwrap();
        }
        holds("one look", || {
            ratio(folder.path(), || {
                assert!(Ledger::list(&dir).unwrap().is_empty());
                assert_eq!(Segments::default().look(&dir).len(), 500);
            })
        });
        for at in 0..20_000 {
            fs::write(folder.path().join(format!("other_{at}")), foreign(at)).unwrap();
        }
        let mut segments = Segments::default();
        let later = now_s() + 10;
        segments.look_at(&dir, later);
        assert_eq!(segments.reads(), 20_000);
        let segments = std::cell::RefCell::new(segments);
        holds("again", || {
            ratio(folder.path(), || {
                assert!(Ledger::list(&dir).unwrap().is_empty());
                assert_eq!(segments.borrow_mut().look_at(&dir, later).len(), 10_000);
            })
        });
        assert_eq!(segments.borrow().reads(), 20_000, "no file was read again");
    }

    #[test]
    fn what_changed_or_may_be_a_pool_is_read_again() {
        let (folder, dir) = folder();
        let path = |name: &str| folder.path().join(name);
        write_new(&path("pool"), Bytes::mib(64)).unwrap();
        fs::write(path("kvcached_zeros"), [0; SEGMENT_BYTES]).unwrap();
        fs::write(path("text"), *b"twenty-four letters long").unwrap();
        let (mut segments, later) = (Segments::default(), now_s() + 10);
        segments.look_at(&dir, now_s() - 10);
        segments.look_at(&dir, later);
        assert_eq!(segments.reads(), 6, "what was written a moment ago is read again");
        let names = |found: Vec<(String, SegmentView)>| found.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(segments.look_at(&dir, later)), ["pool", "text"]);
        assert_eq!(segments.reads(), 8, "the two that may be pools");
        // Written over in place, replaced, and gone.
        fs::write(path("text"), SegmentView { limit: 5, used: 0, prealloc: 0 }.to_bytes()).unwrap();
        let found = segments.look_at(&dir, later);
        assert!(found.iter().any(|(name, view)| name == "text" && view.limit == 5), "{found:?}");
        fs::write(path("pool"), [0; SEGMENT_BYTES]).unwrap();
        assert_eq!(names(segments.look_at(&dir, later)), ["text"]);
        fs::remove_file(path("text")).unwrap();
        assert_eq!(names(segments.look_at(&dir, later)), [""; 0]);
        write_new(&path("pool"), Bytes::mib(1)).unwrap();
        assert_eq!(names(segments.look_at(&dir, later)), ["pool"]);
    }
}
