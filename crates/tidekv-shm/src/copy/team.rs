//! Threads that copy parts of one block.
//!
//! ```text
//!   block    |   part 0   |   part 1   |   part 2   |     parts end at multiples of 4 KiB of the destination
//!              the caller    helper 1     helper 2      and the caller returns when the last one is done
//! ```
//!
//! Helpers are started when a block first needs them and sleep between blocks. One block at a time has them: a caller
//! that finds them busy copies alone, so that nobody ever waits for somebody else's block. A forked child has no
//! helpers, whatever it inherited, and copies alone too.

use std::num::NonZero;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, TryLockError};
use std::thread::{self, JoinHandle};

use tidekv_fork::Birth;

use super::Method;

/// Where one part ends and the next begins.
const PART_ALIGNMENT: usize = 4096;

/// A caller and its helpers.
#[derive(Debug)]
pub(super) struct Team {
    threads: NonZero<usize>,
    birth: Birth,
    helpers: Mutex<Vec<Helper>>,
}

#[derive(Debug)]
struct Helper {
    parts: Option<Sender<Part>>,
    done: Receiver<u32>,
    thread: Option<JoinHandle<()>>,
}

/// A piece of a block that a helper copies.
#[derive(Debug)]
struct Part {
    method: Method,
    destination: *mut u8,
    source: *const u8,
    len: usize,
    checksum: bool,
}

// SAFETY: a part is two ranges that its sender vouches for until it hears that the part is done; nothing about them
// belongs to a thread.
unsafe impl Send for Part {}

impl Part {
    /// # Safety
    ///
    /// That of [`Method::copy_unchecked`] for the two ranges.
    unsafe fn copy(&self) -> u32 {
        let Self { method, destination, source, len, checksum } = *self;
        if checksum {
            // SAFETY: the caller's promise.
            return unsafe { super::checksum::copy(method, destination, source, len) };
        }
        // SAFETY: the caller's promise.
        unsafe { method.copy_unchecked(destination, source, len) };
        0
    }
}

impl Team {
    pub(super) fn new(threads: NonZero<usize>) -> Self {
        Self { threads, birth: Birth::here(), helpers: Mutex::new(Vec::new()) }
    }

    pub(super) fn threads(&self) -> usize {
        self.threads.get()
    }

    /// Copies a block with all threads, or with the caller alone where they are busy or cannot be had. Answers the
    /// checksum of the block if one is wanted, else 0.
    ///
    /// # Safety
    ///
    /// That of [`Method::copy_unchecked`].
    pub(super) unsafe fn copy(
        &self,
        method: Method,
        destination: *mut u8,
        source: *const u8,
        len: usize,
        checksum: bool,
    ) -> u32 {
        let whole = Part { method, destination, source, len, checksum };
        if self.threads.get() == 1 || self.birth.is_foreign() {
            // SAFETY: the caller's promise.
            return unsafe { whole.copy() };
        }
        let mut helpers = match self.helpers.try_lock() {
            Ok(helpers) => helpers,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                // SAFETY: the caller's promise.
                return unsafe { whole.copy() };
            }
        };
        while helpers.len() + 1 < self.threads.get() {
            match Helper::start() {
                Some(helper) => helpers.push(helper),
                None => break,
            }
        }
        // SAFETY: the caller's promise; the parts are done when this returns.
        unsafe { copy_in_parts(&helpers, &whole) }
    }
}

/// # Safety
///
/// That of [`Method::copy_unchecked`] for the whole.
unsafe fn copy_in_parts(helpers: &[Helper], whole: &Part) -> u32 {
    let ends = part_ends(whole.destination.addr(), whole.len, helpers.len() + 1);
    let part = |index: usize| {
        let (start, end) = (if index == 0 { 0 } else { ends[index - 1] }, ends[index]);
        // Wrapping, because an empty part may start just behind the block.
        let destination = whole.destination.wrapping_add(start);
        let source = whole.source.wrapping_add(start);
        Part { method: whole.method, destination, source, len: end - start, checksum: whole.checksum }
    };
    let mut refused = Vec::new();
    for (index, helper) in helpers.iter().enumerate() {
        if let Err(part) = helper.give(part(index + 1)) {
            refused.push((index, part));
        }
    }
    let mut sums = vec![0; helpers.len() + 1];
    // SAFETY: a part of the whole, which no helper has.
    sums[0] = unsafe { part(0).copy() };
    for (index, part) in &refused {
        // SAFETY: the same: its helper gave it back.
        sums[index + 1] = unsafe { part.copy() };
    }
    for (index, helper) in helpers.iter().enumerate() {
        if refused.iter().all(|(gone, _)| *gone != index) {
            sums[index + 1] = helper.wait();
        }
    }
    let lens = (0..=helpers.len()).map(|index| part(index).len);
    if whole.checksum { super::checksum::of_parts(sums.into_iter().zip(lens)) } else { 0 }
}

/// Where each of `parts` parts ends, the last at `len`.
fn part_ends(address: usize, len: usize, parts: usize) -> Vec<usize> {
    let end_of = |part: usize| {
        // The division first: a block of half the address space is no reason to overflow.
        let even = len / parts * part;
        let past_boundary = (address.wrapping_add(even)) % PART_ALIGNMENT;
        even.saturating_sub(past_boundary)
    };
    (1..=parts).map(|part| if part == parts { len } else { end_of(part) }).collect()
}

impl Helper {
    /// `None` where the system has no thread to spare.
    fn start() -> Option<Self> {
        let (parts, orders) = mpsc::channel::<Part>();
        let (report, done) = mpsc::channel();
        let thread = thread::Builder::new().name("tidekv-copy".to_owned()).spawn(move || {
            while let Ok(part) = orders.recv() {
                // SAFETY: the sender vouches for the ranges until it hears from us.
                let sum = unsafe { part.copy() };
                if report.send(sum).is_err() {
                    return;
                }
            }
        });
        Some(Self { parts: Some(parts), done, thread: Some(thread.ok()?) })
    }

    /// Gives the part back where the helper is gone.
    fn give(&self, part: Part) -> Result<(), Part> {
        match &self.parts {
            Some(parts) => parts.send(part).map_err(|refused| refused.0),
            None => Err(part),
        }
    }

    /// Waits for the part that was given.
    fn wait(&self) -> u32 {
        self.done.recv().expect("a helper copies until its orders end, and copying does not panic")
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        drop(self.parts.take());
        if let Some(thread) = self.thread.take() {
            // It can only end well: see `wait`.
            let _ = thread.join();
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        if self.birth.is_foreign() {
            // The threads are the parent's. Joining them would wait for ever; what they are made of is lost.
            let helpers = self.helpers.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
            std::mem::take(helpers).into_iter().for_each(std::mem::forget);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_cover_the_block_in_order(address in 0..100_000usize, len in 0..10_000_000usize, parts in 1..17usize) {
            let ends = part_ends(address, len, parts);
            prop_assert_eq!(ends.len(), parts);
            prop_assert_eq!(ends[parts - 1], len);
            prop_assert!(ends.is_sorted());
            prop_assert!(ends[..parts - 1].iter().all(|&end| end == 0 || (address + end) % PART_ALIGNMENT == 0));
        }
    }
}
