//! What is particular to host memory: forks, raw addresses, the kernel's own count of what we hold.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::Arc;

use support::{mark, marked, pages, reserve, start};
use tidekv_core::geometry::Placement;
use tidekv_core::units::Bytes;
use tidekv_mem::host::{HostBackend, HostOptions, HugePages};
use tidekv_mem::{Backend, BackendName, Call, MapError, MemError, RegionOptions, Reservation, UnmapError};

const PAGE: Bytes = Bytes::mib(2);

fn open(options: HostOptions) -> Arc<dyn Backend> {
    Arc::new(HostBackend::open(options).unwrap())
}

#[test]
fn the_kernel_counts_what_we_count() {
    let backend = open(HostOptions::default());
    let reservation = reserve(&backend, PAGE, 8);
    assert_eq!(reservation.witness(), Some(Bytes::ZERO), "address space alone costs nothing");
    reservation.map_pages(&pages([1, 3, 5])).unwrap();
    assert_eq!(reservation.witness(), Some(Bytes(3 * PAGE.0)), "committed before anything is touched");
    reservation.unmap_pages(&pages([3])).unwrap();
    assert_eq!(reservation.witness(), Some(Bytes(2 * PAGE.0)));
    assert_eq!(backend.held(), Bytes(2 * PAGE.0));
}

#[test]
fn lazy_memory_is_committed_by_touching_it() {
    let backend = open(HostOptions { lazy: true, ..HostOptions::default() });
    let reservation = reserve(&backend, PAGE, 2);
    reservation.map_pages(&pages([0])).unwrap();
    assert_eq!(reservation.witness(), Some(Bytes::ZERO));
    mark(&reservation, 0, 1);
    let touched = reservation.witness().unwrap();
    assert!(touched > Bytes::ZERO && touched <= PAGE, "{touched}");
    assert_eq!(backend.held(), PAGE, "the budget counts the promise, not the touch");
}

#[test]
fn the_address_is_ordinary_memory() {
    let backend = open(HostOptions::default());
    let reservation = reserve(&backend, PAGE, 4);
    reservation.map_pages(&pages([2])).unwrap();
    let address = reservation.base_address() + start(&reservation, 2).0;
    let pointer = std::ptr::with_exposed_provenance_mut::<u64>(usize::try_from(address).unwrap());
    // SAFETY: page 2 is mapped, aligned far beyond 8 bytes, and this test is its only user.
    unsafe { pointer.write(0x0123_4567_89ab_cdef) };
    let mut bytes = [0; 8];
    reservation.read(start(&reservation, 2), &mut bytes).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), 0x0123_4567_89ab_cdef);
}

#[test]
fn more_than_the_machine_has_is_an_error_and_not_a_kill() {
    let backend = open(HostOptions::default());
    let huge = Bytes(backend.memory().unwrap().total.0.next_multiple_of(PAGE.0) * 2);
    let reservation = reserve(&backend, huge, 1);
    let refused = reservation.map_pages(&pages([0])).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused:?}");
    assert_eq!((reservation.witness(), backend.held()), (Some(Bytes::ZERO), Bytes::ZERO));
}

#[test]
fn reserved_huge_pages_work_or_are_refused_in_one_sentence() {
    match HostBackend::open(HostOptions { huge_pages: HugePages::Reserved, ..HostOptions::default() }) {
        Err(error @ MemError::Unsupported { .. }) => assert!(error.to_string().contains("vm.nr_hugepages"), "{error}"),
        Err(error) => panic!("{error}"),
        Ok(backend) => {
            let backend: Arc<dyn Backend> = Arc::new(backend);
            assert_eq!(backend.capabilities().granularity, Bytes::mib(2));
            let reservation = reserve(&backend, Bytes::mib(2), 2);
            // The pool may be in use by others: then it is out of memory, as a value.
            match reservation.map_pages(&pages([0])) {
                Ok(()) => mark(&reservation, 0, 9),
                Err(error) => assert!(error.is_out_of_memory(), "{error:?}"),
            }
        }
    }
}

/// Many scattered single pages: the kernel's limit on mappings is an error that names the knob, and nothing leaks.
#[test]
fn too_many_mappings_is_an_error_that_names_the_limit() {
    let limit: u32 = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    if limit > 300_000 {
        // A machine that allows millions would take gigabytes to fill; the refusal cannot be provoked cheaply there.
        support::skip("too_many_mappings_is_an_error_that_names_the_limit", &format!("vm.max_map_count is {limit}"));
        return;
    }
    let backend = open(HostOptions { lazy: true, ..HostOptions::default() });
    let granularity = backend.capabilities().granularity;
    let reservation = reserve(&backend, granularity, limit + 10);
    let refused = (0..limit + 10).step_by(2).find_map(|page| reservation.map_pages(&pages([page])).err());
    let Some(MapError::Refused { source, stuck: 0, .. }) = refused else { panic!("{refused:?}") };
    assert!(source.to_string().contains("vm.max_map_count"), "{source}");
    let mapped = reservation.mapped_pages();
    assert_eq!(backend.held(), Bytes(granularity.0 * u64::from(mapped)));
    drop(reservation);
    assert_eq!(backend.held(), Bytes::ZERO);
}

/// Forks, runs `child` there, and gives back its exit status. The child never returns into the test harness.
fn in_forked_child(child: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child uses only memory that existed before the fork, allocates little, and leaves through `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: ends the child at once, without the harness's exit handlers.
        unsafe { libc::_exit(i32::from(!passed)) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child and writes to a local.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid);
    status
}

#[test]
fn a_forked_child_is_refused_and_its_parent_unharmed() {
    let backend = open(HostOptions::default());
    let reservation = reserve(&backend, PAGE, 4);
    reservation.map_pages(&pages([0, 1])).unwrap();
    mark(&reservation, 0, 7);
    let status = in_forked_child(|| {
        let refused_map = matches!(reservation.map_pages(&pages([2])), Err(MapError::Forked));
        let refused_unmap = matches!(reservation.unmap_pages(&pages([0])), Err(UnmapError::Forked));
        let refused_read = matches!(reservation.read(start(&reservation, 0), &mut [0; 8]), Err(MemError::Forked));
        // The memory file's descriptor was closed: its number is free, and asking the kernel about it fails.
        let no_descriptor = reservation.witness().is_none();
        let no_mapping = !mapped_in_this_process(reservation.base_address());
        refused_map && refused_unmap && refused_read && no_descriptor && no_mapping
    });
    assert_eq!(status, 0, "the child saw something it should not");
    assert_eq!(marked(&reservation, 0), Some(7));
    reservation.unmap_pages(&pages([0, 1])).unwrap();
    assert_eq!(reservation.witness(), Some(Bytes::ZERO));
}

#[test]
fn a_forked_child_that_drops_everything_takes_nothing_with_it() {
    let backend = open(HostOptions::default());
    let reservation = reserve(&backend, PAGE, 4);
    reservation.map_pages(&pages([3])).unwrap();
    mark(&reservation, 3, 33);
    let mut moved = Some((backend, reservation));
    let status = in_forked_child(|| {
        // A descriptor opened in the child may get the number of the one that was closed: dropping must not close it.
        let file = std::fs::File::open("/proc/self/status").unwrap();
        drop(moved.take());
        std::io::Read::read(&mut &file, &mut [0; 4]).is_ok()
    });
    assert_eq!(status, 0);
    let (backend, reservation) = moved.take().unwrap();
    assert_eq!(marked(&reservation, 3), Some(33));
    drop(reservation);
    assert_eq!(backend.held(), Bytes::ZERO);
}

#[test]
fn a_forked_child_can_have_memory_of_its_own() {
    let parent = open(HostOptions::default());
    let _kept = reserve(&parent, PAGE, 2);
    let status = in_forked_child(|| {
        let backend = open(HostOptions::default());
        let reservation = reserve(&backend, PAGE, 2);
        reservation.map_pages(&pages([1])).unwrap();
        mark(&reservation, 1, 5);
        marked(&reservation, 1) == Some(5)
    });
    assert_eq!(status, 0);
}

/// After a fork in the middle of life, unmapped memory is really free although the child still lives.
#[test]
fn a_living_child_keeps_no_memory_of_its_parent() {
    let backend = open(HostOptions::default());
    let reservation = reserve(&backend, PAGE, 4);
    reservation.map_pages(&pages([0, 1, 2, 3])).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    // SAFETY: as in `in_forked_child`; the child only waits for the pipe to close.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(writer);
        let _ = std::io::Read::read(&mut &reader, &mut [0; 1]);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    reservation.unmap_pages(&pages([0, 1, 2])).unwrap();
    assert_eq!(reservation.witness(), Some(PAGE), "the hole is punched although a child was forked meanwhile");
    drop(writer);
    let mut status = 0;
    // SAFETY: waits for our own child and writes to a local.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0);
}

fn mapped_in_this_process(address: u64) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().any(|line| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let parse = |text| u64::from_str_radix(text, 16).unwrap();
        (parse(start)..parse(end)).contains(&address)
    })
}

#[test]
fn auto_finds_memory_on_every_machine() {
    let backend = tidekv_mem::open(BackendName::Auto, 0).unwrap();
    assert!(["host", "cuda"].contains(&backend.capabilities().name));
    assert!("hsot".parse::<BackendName>().unwrap_err().contains("host, cuda, fake or auto"));
}

#[test]
fn a_page_costs_three_calls_to_map_and_two_to_unmap() {
    let backend = open(HostOptions::default());
    let reservation = reserve(&backend, PAGE, 1);
    let before = backend.meter().total();
    reservation.map_pages(&pages([0])).unwrap();
    assert_eq!(backend.meter().total() - before, 3);
    reservation.unmap_pages(&pages([0])).unwrap();
    assert_eq!(backend.meter().total() - before, 5);
    assert_eq!(backend.meter().made(Call::Reserve), 1);
}

#[test]
fn a_reservation_outlives_its_backend_variable() {
    let reservation = {
        let backend = open(HostOptions::default());
        Reservation::new(backend, Placement::uniform(PAGE, 2).unwrap(), RegionOptions::default()).unwrap()
    };
    reservation.map_pages(&pages([1])).unwrap();
    mark(&reservation, 1, 8);
    assert_eq!(marked(&reservation, 1), Some(8));
}
