//! One thread of this process at a time, with a deadline.
//!
//! Threads that use one descriptor do not exclude each other by its locks, so they take turns first. Not a plain mutex:
//! whoever has the turn may be waiting for another process, and a mutex would make the others wait for *his* deadline.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A value that one thread at a time takes away and puts back.
#[derive(Debug)]
pub(crate) struct Turn<T> {
    place: Mutex<Option<T>>,
    put_back: Condvar,
}

impl<T> Turn<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { place: Mutex::new(Some(value)), put_back: Condvar::new() }
    }

    /// Takes the value; `Err` says how long it was away.
    pub(crate) fn take(&self, deadline: Instant) -> Result<Taken<'_, T>, Duration> {
        let started = Instant::now();
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(value) = place.take() {
                return Ok(Taken { turn: self, value: Some(value) });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(started.elapsed());
            }
            place = self.put_back.wait_timeout(place, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The value, until it is dropped; also when its holder panics.
#[derive(Debug)]
pub(crate) struct Taken<'a, T> {
    turn: &'a Turn<T>,
    value: Option<T>,
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("present until drop")
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("present until drop")
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        *self.turn.place.lock().unwrap_or_else(PoisonError::into_inner) = self.value.take();
        self.turn.put_back.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_wait_no_longer_than_their_own_deadline() {
        let turn = Turn::new(1);
        let held = turn.take(Instant::now()).unwrap();
        let wait = Duration::from_millis(10);
        assert!(turn.take(Instant::now() + wait).unwrap_err() >= wait);
        drop(held);
        assert_eq!(*turn.take(Instant::now()).unwrap(), 1);
    }

    #[test]
    fn a_panic_puts_it_back() {
        let turn = Turn::new(1);
        std::thread::scope(|scope| {
            let turn = &turn;
            let failed = scope.spawn(move || {
                let _held = turn.take(Instant::now()).unwrap();
                panic!("on purpose");
            });
            assert!(failed.join().is_err());
        });
        assert!(turn.take(Instant::now()).is_ok());
    }

    #[test]
    fn every_waiter_gets_its_turn() {
        let turn = Turn::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        *turn.take(Instant::now() + Duration::from_secs(60)).unwrap() += 1;
                    }
                });
            }
        });
        assert_eq!(*turn.take(Instant::now()).unwrap(), 4000);
    }
}
