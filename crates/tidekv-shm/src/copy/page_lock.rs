//! Memory that a device may copy from and to at full speed: registered with it, and taken back before it is unmapped.
//!
//! ```text
//!   new     register(range 0), register(range 1), ...        one fails: those before it are unregistered, in reverse
//!   drop    ..., unregister(range 1), unregister(range 0), then the memory itself is dropped
//! ```
//!
//! The order is the whole point: a driver that still knows pages of a mapping that is gone ends in a fault of the
//! device, or worse, in copies to whoever got the address next. Memory that the driver will not let go of is leaked.
//!
//! This crate knows no device. Whoever has one implements [`PageLock`], with CUDA for instance by `cuMemHostRegister`
//! and `cuMemHostUnregister`.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

/// Registers host memory with a device.
///
/// # Safety
///
/// After [`unregister`](Self::unregister) has answered `Ok`, and after `register` has answered an error, the device
/// never touches the range again.
pub unsafe trait PageLock: fmt::Debug + Send + Sync {
    /// Locks the pages of a range into memory and makes them known to the device.
    fn register(&self, range: HostRange) -> Result<(), PageLockError>;

    /// Undoes it.
    fn unregister(&self, range: HostRange) -> Result<(), PageLockError>;
}

/// Memory that stays where it is.
///
/// # Safety
///
/// Every range is mapped, at the same address, for as long as the value lives, wherever the value itself is moved.
pub unsafe trait HostMemory {
    /// The ranges to register, in order.
    fn ranges(&self) -> Vec<HostRange>;
}

/// Some bytes of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRange {
    /// The first byte.
    pub base: NonNull<u8>,
    /// How many there are.
    pub len: usize,
}

// SAFETY: an address and a length; what is there is reached by unsafe code only.
unsafe impl Send for HostRange {}
// SAFETY: the same.
unsafe impl Sync for HostRange {}

/// The device said no.
#[derive(Debug, thiserror::Error)]
#[error("the device does not {action} {len} bytes of host memory: {reason}")]
pub struct PageLockError {
    /// `register` or `unregister`.
    pub action: &'static str,
    /// Bytes of the range.
    pub len: usize,
    /// What the driver says.
    pub reason: String,
}

/// Memory that a device knows for as long as this lives.
#[derive(Debug)]
pub struct PageLocked<M: HostMemory> {
    memory: ManuallyDrop<M>,
    registered: Registered,
}

/// Ranges in the order of their registration.
#[derive(Debug)]
struct Registered {
    lock: Arc<dyn PageLock>,
    ranges: Vec<HostRange>,
}

impl Registered {
    /// The last first. Answers the error that ended it, with the ranges that are left.
    fn undo(&mut self) -> Result<(), PageLockError> {
        while let Some(&range) = self.ranges.last() {
            self.lock.unregister(range)?;
            self.ranges.pop();
        }
        Ok(())
    }
}

impl<M: HostMemory> PageLocked<M> {
    /// Registers all ranges of `memory`. On failure none is registered and the memory comes back, unless the device
    /// will not let go of one of them; then the memory is leaked.
    pub fn new(memory: M, lock: Arc<dyn PageLock>) -> Result<Self, (Option<M>, PageLockError)> {
        let wanted = memory.ranges();
        let mut registered = Registered { lock, ranges: Vec::with_capacity(wanted.len()) };
        for range in wanted {
            if let Err(error) = registered.lock.register(range) {
                return Err(match registered.undo() {
                    Ok(()) => (Some(memory), error),
                    Err(_) => {
                        std::mem::forget(memory);
                        (None, error)
                    }
                });
            }
            registered.ranges.push(range);
        }
        Ok(Self { memory: ManuallyDrop::new(memory), registered })
    }

    /// The memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The memory, to change.
    pub fn memory_mut(&mut self) -> &mut M {
        &mut self.memory
    }
}

impl<M: HostMemory> Drop for PageLocked<M> {
    fn drop(&mut self) {
        if self.registered.undo().is_ok() {
            // SAFETY: dropped here and nowhere else, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    type Log = Arc<Mutex<Vec<String>>>;
    type Outcome = Result<PageLocked<Memory>, (Option<Memory>, PageLockError)>;

    #[derive(Debug)]
    struct Fake {
        log: Log,
        refuses: &'static str,
    }

    impl Fake {
        fn say(&self, action: &'static str, range: HostRange) -> Result<(), PageLockError> {
            let line = format!("{action} {}", range.len);
            let refused = self.refuses == line;
            self.log.lock().unwrap().push(line);
            if refused { Err(PageLockError { action, len: range.len, reason: "no".into() }) } else { Ok(()) }
        }
    }

    // SAFETY: there is no device.
    unsafe impl PageLock for Fake {
        fn register(&self, range: HostRange) -> Result<(), PageLockError> {
            self.say("register", range)
        }

        fn unregister(&self, range: HostRange) -> Result<(), PageLockError> {
            self.say("unregister", range)
        }
    }

    #[derive(Debug)]
    struct Memory {
        pieces: Vec<Box<[u8]>>,
        log: Log,
    }

    // SAFETY: boxes do not move.
    unsafe impl HostMemory for Memory {
        fn ranges(&self) -> Vec<HostRange> {
            let range = |piece: &[u8]| HostRange { base: NonNull::from(&piece[0]), len: piece.len() };
            self.pieces.iter().map(|piece| range(piece)).collect()
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            self.log.lock().unwrap().push("unmap".to_owned());
        }
    }

    fn lock(refuses: &'static str) -> (Outcome, Log) {
        let log = Log::default();
        let memory = Memory { pieces: vec![vec![0; 1].into(), vec![0; 2].into(), vec![0; 3].into()], log: log.clone() };
        (PageLocked::new(memory, Arc::new(Fake { log: log.clone(), refuses })), log)
    }

    #[test]
    fn teardown_is_the_reverse_and_memory_goes_last() {
        let (locked, log) = lock("");
        drop(locked.unwrap());
        let expected =
            ["register 1", "register 2", "register 3", "unregister 3", "unregister 2", "unregister 1", "unmap"];
        assert_eq!(*log.lock().unwrap(), expected);
    }

    #[test]
    fn a_refused_registration_undoes_the_others_and_gives_the_memory_back() {
        let (locked, log) = lock("register 3");
        let (memory, error) = locked.unwrap_err();
        assert_eq!(error.to_string(), "the device does not register 3 bytes of host memory: no");
        assert_eq!(*log.lock().unwrap(), ["register 1", "register 2", "register 3", "unregister 2", "unregister 1"]);
        assert!(memory.is_some());
    }

    #[test]
    fn memory_that_the_device_keeps_is_never_unmapped() {
        let (locked, log) = lock("unregister 2");
        let locked = locked.unwrap();
        let kept = locked.memory().pieces.len();
        drop(locked);
        assert_eq!(kept, 3);
        let lines = log.lock().unwrap();
        assert_eq!(lines.last().map(String::as_str), Some("unregister 2"), "{lines:?}");
    }
}
