//! Who computes: the calling thread alone, or all threads, by the size of the work.
//!
//! Handing work to another thread costs tens of microseconds on a quiet machine and far more on a busy one; a product of
//! a small model takes three. The libraries below decide for themselves and hand over much earlier, but they do it
//! through rayon, in the pool that the calling thread belongs to. So a thread that computes is made a pool of its own
//! with itself as the only member: what is started there stays there, and only work that is large enough goes to the
//! pool of many.

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::compute::ComputeError;

/// Multiplications from which other threads are worth their price.
const LARGE: usize = 4 << 20;

/// The threads of one model.
#[derive(Debug)]
pub(super) struct Threads {
    /// `None` where the calling thread is all there is.
    many: Option<ThreadPool>,
}

impl Threads {
    pub(super) fn new(threads: usize) -> Result<Self, ComputeError> {
        let builder = ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("compute-{index}"));
        let build = || builder.build().map_err(|source| ComputeError::Threads { threads, source });
        Ok(Self { many: (threads > 1).then(build).transpose()? })
    }

    /// Runs `work` of so many multiplications; what it starts in parallel runs on this thread or on all of them.
    pub(super) fn run<T: Send>(&self, multiplications: usize, work: impl FnOnce() -> T + Send) -> T {
        match &self.many {
            Some(many) if multiplications >= LARGE => many.install(work),
            _ => {
                stay_here();
                work()
            }
        }
    }
}

/// Makes the calling thread a pool of its own, once.
fn stay_here() {
    thread_local! {
        // A thread that belongs to a pool already stays in it: its owner decided.
        static ALONE: Option<ThreadPool> = ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().ok();
    }
    ALONE.with(|_| ());
}
