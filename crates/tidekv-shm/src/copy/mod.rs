//! Copying KV blocks as fast as this machine can.
//!
//! ```text
//!   Copier::copy(to, from, Destination::Cold)
//!       │
//!       ├─ profile     size and destination -> method, one thread or all        measured once, kept in ~/.cache
//!       ├─ method      memcpy, rep movsb, non-temporal stores                   x86: the loops
//!       └─ team        helpers that copy parts of large blocks
//!
//!   calibrate    measures a profile            checksum     CRC-32C of what is copied, in the same pass
//!   kept         its file                      page_lock    memory that a device copies from and to
//!   host         what it is valid for          overlap      what is refused
//! ```
//!
//! `memcpy` reads every line of the destination before it overwrites it, because it cannot know that nobody wants the
//! old bytes in a cache. For KV blocks on their way to another process, to a device or to later, that is a third of
//! all traffic. So the caller says what happens to the copy next ([`Destination`]), and the profile knows what follows
//! from it on this processor.
//!
//! Blocks are slices, or raw pointers for memory that other processes map too ([`Copier::copy_raw`]).

mod calibrate;
mod checksum;
mod host;
mod kept;
mod method;
mod overlap;
pub mod page_lock;
mod profile;
mod team;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86;

use std::num::NonZero;
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub use checksum::crc32c;
pub use host::allowed_cpus;
pub use method::{Method, non_temporal_width};
pub use overlap::CopyError;
pub use profile::{Destination, Profile};

use team::Team;

/// More threads than this have never been worth it: a few of them saturate the memory of a socket.
const MAX_THREADS: usize = 8;

/// How a [`Copier`] is made.
#[derive(Clone, Debug)]
pub struct CopyOptions {
    /// Threads of one large copy, the caller among them.
    pub threads: NonZero<usize>,
    /// Where its choices come from.
    pub profile: ProfileSource,
}

/// Where a profile comes from.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ProfileSource {
    /// The user's cache folder; measured and kept there if it is not.
    Kept,
    /// The same in this file.
    KeptAt(PathBuf),
    /// Measured now, and not kept.
    Measured,
    /// This one.
    Given(Profile),
}

impl Default for CopyOptions {
    /// As many threads as processors (eight at most), and the profile of the user's cache folder.
    fn default() -> Self {
        let most = NonZero::new(MAX_THREADS).unwrap_or(NonZero::<usize>::MIN);
        Self { threads: allowed_cpus().min(most), profile: ProfileSource::Kept }
    }
}

/// How a [`Copier`] came to its profile.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Calibration {
    /// It was given.
    Given,
    /// It was read from this file.
    Loaded(PathBuf),
    /// It was measured, and kept in this file if there is one.
    Measured {
        /// How long that took.
        took: Duration,
        /// Where the next process will find it.
        kept: Option<PathBuf>,
    },
    /// There was no memory to measure with: see [`Profile::assumed`].
    Assumed,
}

/// Copies blocks. Shared by any number of threads.
#[derive(Debug)]
pub struct Copier {
    profile: Profile,
    calibration: Calibration,
    team: Team,
}

impl Copier {
    /// Finds the profile, or measures it, which takes less than half a second on an idle machine.
    pub fn new(options: CopyOptions) -> Self {
        let team = Team::new(options.threads);
        let (profile, calibration) = match options.profile {
            ProfileSource::Given(profile) => (profile, Calibration::Given),
            ProfileSource::Measured => measure(None),
            ProfileSource::Kept => load_or_measure(kept::user_path(&host::key())),
            ProfileSource::KeptAt(path) => load_or_measure(Some(path)),
        };
        Self { profile, calibration, team }
    }

    /// How the profile was come by.
    pub fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// The method that a block of `len` bytes is copied with, and whether all threads take part.
    pub fn choice(&self, destination: Destination, len: usize) -> (Method, bool) {
        self.profile.choose(destination, len, self.team.threads())
    }

    /// Copies `source` over `to`, which has the same length.
    pub fn copy(&self, to: &mut [u8], source: &[u8], destination: Destination) -> Result<(), CopyError> {
        overlap::check_lengths(to.len(), source.len())?;
        // SAFETY: two references of this length, one of them exclusive, so that they cannot overlap.
        unsafe { self.copy_part(to.as_mut_ptr(), source.as_ptr(), source.len(), destination, false) };
        Ok(())
    }

    /// The same, and answers the CRC-32C of the bytes.
    pub fn copy_crc32c(&self, to: &mut [u8], source: &[u8], destination: Destination) -> Result<u32, CopyError> {
        overlap::check_lengths(to.len(), source.len())?;
        // SAFETY: two references of this length, one of them exclusive, so that they cannot overlap.
        Ok(unsafe { self.copy_part(to.as_mut_ptr(), source.as_ptr(), source.len(), destination, true) })
    }

    /// Copies `len` bytes between memory that may be mapped by other processes too. Ranges that overlap are refused.
    ///
    /// # Safety
    ///
    /// `source` is valid for reads of `len` bytes and `to` for writes of as many. For the time of the call nobody, in
    /// whatever process, writes to the source or touches the destination.
    pub unsafe fn copy_raw(
        &self,
        to: *mut u8,
        source: *const u8,
        len: usize,
        destination: Destination,
    ) -> Result<(), CopyError> {
        overlap::check_ranges(to.addr(), source.addr(), len)?;
        // SAFETY: the caller's promise, and the ranges do not overlap.
        unsafe { self.copy_part(to, source, len, destination, false) };
        Ok(())
    }

    /// [`copy_raw`](Self::copy_raw) that answers the CRC-32C of the bytes.
    ///
    /// # Safety
    ///
    /// That of [`copy_raw`](Self::copy_raw).
    pub unsafe fn copy_raw_crc32c(
        &self,
        to: *mut u8,
        source: *const u8,
        len: usize,
        destination: Destination,
    ) -> Result<u32, CopyError> {
        overlap::check_ranges(to.addr(), source.addr(), len)?;
        // SAFETY: the caller's promise, and the ranges do not overlap.
        Ok(unsafe { self.copy_part(to, source, len, destination, true) })
    }

    /// # Safety
    ///
    /// That of [`Method::copy_unchecked`].
    unsafe fn copy_part(
        &self,
        to: *mut u8,
        source: *const u8,
        len: usize,
        destination: Destination,
        checksum: bool,
    ) -> u32 {
        match self.choice(destination, len) {
            // SAFETY: the caller's promise.
            (method, true) => unsafe { self.team.copy(method, to, source, len, checksum) },
            // SAFETY: the same.
            (method, false) if checksum => unsafe { checksum::copy(method, to, source, len) },
            (method, false) => {
                // SAFETY: the same.
                unsafe { method.copy_unchecked(to, source, len) };
                0
            }
        }
    }
}

impl Default for Copier {
    fn default() -> Self {
        Self::new(CopyOptions::default())
    }
}

fn load_or_measure(path: Option<PathBuf>) -> (Profile, Calibration) {
    let Some(path) = path else { return measure(None) };
    match kept::load(&path, &host::key()) {
        Some(profile) => (profile, Calibration::Loaded(path)),
        None => measure(Some(path)),
    }
}

/// Measures with all processors, whatever the copier will use: the profile is for all copiers of this machine.
fn measure(keep_at: Option<PathBuf>) -> (Profile, Calibration) {
    let started = Instant::now();
    let Some(profile) = calibrate::measure(&Team::new(CopyOptions::default().threads)) else {
        return (Profile::assumed(), Calibration::Assumed);
    };
    let kept = keep_at.filter(|path| kept::store(path, &host::key(), &profile));
    (profile, Calibration::Measured { took: started.elapsed(), kept })
}

#[cfg(test)]
mod tests;
