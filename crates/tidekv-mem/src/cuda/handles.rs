//! Physical memory that this back-end has taken, and the few handles it keeps for reuse.
//!
//! A cached handle saves a release and a create (20-30 us) at the price of memory that nobody else can use. The cache's
//! bound is 0 unless asked for; on a shortage it is emptied before a create is called out of memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tidekv_core::units::Bytes;

use super::context::Entered;
use super::memory::{Handle, Recipe};
use crate::MemError;
use crate::meter::{Call, CallMeter};

#[derive(Debug)]
pub(super) struct Handles {
    held: AtomicU64,
    cache_bound: u64,
    /// Never locked across a driver call.
    cache: Mutex<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    by_size: HashMap<Bytes, Vec<Handle>>,
    bytes: u64,
}

impl Handles {
    pub(super) fn new(cache_bound: Bytes) -> Self {
        Self { held: AtomicU64::new(0), cache_bound: cache_bound.0, cache: Mutex::default() }
    }

    pub(super) fn held(&self) -> Bytes {
        Bytes(self.held.load(Relaxed))
    }

    /// A handle of this size: a cached one, or a new one.
    pub(super) fn take(
        &self,
        entered: &Entered,
        recipe: &Recipe,
        bytes: Bytes,
        meter: &CallMeter,
    ) -> Result<Handle, MemError> {
        if let Some(handle) = self.take_cached(bytes) {
            return Ok(handle);
        }
        meter.announce(Call::Create)?;
        let handle = match entered.create(recipe, bytes) {
            Err(error) if error.is_out_of_memory() && self.trim(entered, meter)? > Bytes::ZERO => {
                meter.announce(Call::Create)?;
                entered.create(recipe, bytes)?
            }
            other => other?,
        };
        self.held.fetch_add(bytes.0, Relaxed);
        Ok(handle)
    }

    /// Gives a handle back, to the cache or to the driver. When the driver refuses, the handle is still the caller's.
    pub(super) fn give(
        &self,
        entered: &Entered,
        handle: Handle,
        bytes: Bytes,
        meter: &CallMeter,
    ) -> Result<(), MemError> {
        if self.keep(handle, bytes) {
            return Ok(());
        }
        meter.announce(Call::Release)?;
        entered.release(handle)?;
        self.held.fetch_sub(bytes.0, Relaxed);
        Ok(())
    }

    /// Empties the cache and says how much memory that gave back.
    pub(super) fn trim(&self, entered: &Entered, meter: &CallMeter) -> Result<Bytes, MemError> {
        let mut freed = 0;
        while let Some((handle, bytes)) = self.take_any_cached() {
            meter
                .announce(Call::Release)
                .and_then(|()| entered.release(handle))
                .inspect_err(|_| self.put_back(handle, bytes))?;
            self.held.fetch_sub(bytes.0, Relaxed);
            freed += bytes.0;
        }
        Ok(Bytes(freed))
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        // Nothing in here panics while holding it; a poisoned cache would still be whole.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_cached(&self, bytes: Bytes) -> Option<Handle> {
        if self.cache_bound == 0 {
            return None;
        }
        let mut cache = self.cache();
        let handle = cache.by_size.get_mut(&bytes)?.pop()?;
        cache.bytes -= bytes.0;
        Some(handle)
    }

    fn take_any_cached(&self) -> Option<(Handle, Bytes)> {
        let mut cache = self.cache();
        let (&bytes, handles) = cache.by_size.iter_mut().find(|(_, handles)| !handles.is_empty())?;
        let handle = handles.pop()?;
        cache.bytes -= bytes.0;
        Some((handle, bytes))
    }

    fn keep(&self, handle: Handle, bytes: Bytes) -> bool {
        if self.cache_bound == 0 {
            return false;
        }
        let fits = self.cache().bytes + bytes.0 <= self.cache_bound;
        if fits {
            self.put_back(handle, bytes);
        }
        fits
    }

    fn put_back(&self, handle: Handle, bytes: Bytes) {
        let mut cache = self.cache();
        cache.by_size.entry(bytes).or_default().push(handle);
        cache.bytes += bytes.0;
    }
}
