//! Ctrl-C as something to wait for, while a command runs that only it ends.
//!
//! Outside of such a command Ctrl-C ends the process, as always: a handler cannot be taken away again once it is there,
//! so the one that stays does what the system would do.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::SIGINT;
use signal_hook::{SigId, flag, low_level};

/// Whether Ctrl-C ends the process.
static DEADLY: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// While it lives, Ctrl-C makes it readable and does nothing else. One at a time.
#[derive(Debug)]
pub(crate) struct Interrupt {
    pressed: UnixStream,
    handler: SigId,
}

impl Interrupt {
    /// From now on.
    pub(crate) fn catch() -> io::Result<Self> {
        let (pressed, presses) = UnixStream::pair()?;
        if DEADLY.get().is_none() {
            let deadly = Arc::clone(DEADLY.get_or_init(Arc::default));
            flag::register_conditional_default(SIGINT, deadly)?;
        }
        set_deadly(false);
        let handler = low_level::pipe::register(SIGINT, presses)?;
        Ok(Self { pressed, handler })
    }
}

impl AsFd for Interrupt {
    /// Readable once Ctrl-C was pressed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pressed.as_fd()
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        low_level::unregister(self.handler);
        set_deadly(true);
    }
}

fn set_deadly(deadly: bool) {
    if let Some(flag) = DEADLY.get() {
        flag.store(deadly, Ordering::SeqCst);
    }
}
