//! Going on with new events as they come.

use std::io;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tidekv_shm::RuntimeDir;
use tidekv_shm::events::EventsWatch;

use super::Filter;
use super::line::Layout;
use super::tapes::{Tapes, Told};
use crate::console::Console;
use crate::exit::Outcome;
use crate::interrupt::Interrupt;

/// A folder that is not there yet is looked for this often; otherwise the kernel says when there is something.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What following waits for.
pub(super) struct Wait {
    watch: EventsWatch,
    interrupt: Interrupt,
}

/// Why it woke.
#[derive(Debug, PartialEq, Eq)]
enum Woken {
    /// There may be something new.
    Look,
    /// Ctrl-C, or nobody reads any more.
    End,
}

impl Wait {
    pub(super) fn new(dir: &RuntimeDir) -> anyhow::Result<Self> {
        Ok(Self { watch: EventsWatch::new(dir)?, interrupt: Interrupt::catch()? })
    }

    fn next(&self) -> io::Result<Woken> {
        let stdout = rustix::stdio::stdout();
        let mut fds = [
            PollFd::new(&self.interrupt, PollFlags::IN),
            PollFd::new(&self.watch, PollFlags::IN),
            // Nothing is asked for: an error is reported all the same, when the reader of a pipe goes away.
            PollFd::new(&stdout, PollFlags::empty()),
        ];
        let timeout = Timespec::try_from(LOOK_AGAIN).expect("a second");
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ended = !fds[0].revents().is_empty() || fds[2].revents().intersects(PollFlags::ERR | PollFlags::HUP);
        Ok(if ended { Woken::End } else { Woken::Look })
    }
}

/// Shows what comes, until Ctrl-C or until nobody reads.
pub(super) fn run(
    wait: Wait,
    tapes: &mut Tapes,
    wanted: &Filter<'_>,
    layout: &mut Layout,
    console: &mut Console,
) -> anyhow::Result<Outcome> {
    loop {
        // Emptied before the look, so that what comes after it wakes us.
        wait.watch.drain()?;
        wait.watch.add_folder()?;
        let told: Vec<Told> = tapes.read(console).into_iter().filter(|told| wanted.admits(told)).collect();
        layout.fit(&told);
        for told in &told {
            layout.show(told, console)?;
        }
        if tapes.watch(&wait.watch)? {
            continue;
        }
        if wait.next()? == Woken::End {
            return Ok(Outcome::Done);
        }
    }
}
