//! Who is on the other side: the kernel's word (`SO_PEERCRED`), not the peer's.
//!
//! For a worker that is whoever connected, for a scheduler whoever listens. The folder keeps strangers out already; this
//! holds even where somebody opened it, or where root made it.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

/// How the kernel is asked. A value of its own so that a test can stand in for the kernel.
pub(crate) type AskUid = fn(BorrowedFd<'_>) -> Result<u32, Errno>;

pub(crate) fn kernel_uid(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    socket_peercred(socket).map(|credentials| credentials.uid.as_raw())
}

/// Why somebody is not spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stranger {
    /// Another user's process.
    Uid(u32),
    /// The kernel does not say.
    Unknown(Errno),
}

/// Whether the peer is of our user.
pub(crate) fn check_peer(socket: BorrowedFd<'_>, ask: AskUid) -> Result<(), Stranger> {
    match ask(socket).map_err(Stranger::Unknown)? {
        uid if uid == geteuid().as_raw() => Ok(()),
        uid => Err(Stranger::Uid(uid)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tidekv_shm::PoolName;

    use super::*;
    use crate::broadcast::{Broadcaster, STRATEGIES, strategy};
    use crate::message::{Balance, Order, Verdict};
    use crate::server::{Handler, WorkerServer};
    use crate::{LaneError, SocketDir};

    const FORGED: u32 = 4_000_000_000;

    struct Nobody;

    impl Handler for Nobody {
        fn handle(&mut self, _: &Order) -> Verdict {
            panic!("nobody is let in")
        }
        fn balance(&mut self, _: &Order) -> Balance {
            Balance::default()
        }
        fn scheduler_came(&mut self) {
            panic!("nobody is let in")
        }
        fn scheduler_gone(&mut self) {}
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn folder() -> (tempfile::TempDir, SocketDir) {
        let root = tempfile::tempdir().unwrap();
        let dir = SocketDir::new(root.path(), &PoolName::new("pool").unwrap());
        (root, dir)
    }

    /// What a kernel would say of another user's process.
    fn forged(_: BorrowedFd<'_>) -> Result<u32, Errno> {
        Ok(FORGED)
    }

    fn unknown(_: BorrowedFd<'_>) -> Result<u32, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    #[test]
    fn a_worker_turns_strangers_away() {
        for ask_uid in [forged as AskUid, unknown] {
            let (_root, dir) = folder();
            let mut server = WorkerServer::bind(&dir, 0, 0).unwrap();
            server.set_ask_uid(ask_uid);
            let stopper = server.stopper();
            std::thread::scope(|scope| {
                let served = scope.spawn(|| server.serve(&mut Nobody));
                for entry in STRATEGIES {
                    let mut caster = Broadcaster::new(dir.clone(), 0, 1, entry, None);
                    assert_eq!(caster.connect(soon()), [Err(LaneError::Closed)], "{}", entry.name);
                }
                stopper.stop();
                served.join().unwrap().unwrap();
            });
        }
    }

    #[test]
    fn a_scheduler_does_not_speak_to_strangers() {
        let (_root, dir) = folder();
        let _server = WorkerServer::bind(&dir, 0, 0).unwrap();
        let mut caster = Broadcaster::new(dir, 0, 1, strategy("seq").unwrap(), None);
        caster.set_ask_uid(forged);
        assert_eq!(caster.connect(soon()), [Err(LaneError::WrongUser { uid: FORGED })]);
        caster.set_ask_uid(unknown);
        assert!(matches!(caster.connect(soon())[0], Err(LaneError::Os { call: "getsockopt", .. })));
    }

    #[test]
    fn the_kernel_knows_us() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(check_peer(std::os::fd::AsFd::as_fd(&ours), kernel_uid), Ok(()));
    }
}
