//! Address space: the tables of an arena, and the window in which its segments appear.
//!
//! ```text
//!   window   |  segment 0  |  segment 1  |  no access ...                      | up to the arena's limit
//!            start         start + 1 << shift
//! ```
//!
//! The window is reserved whole when a process attaches (no memory, no access) and never moves, so an address is the
//! start plus a shift. Segments are mapped into it, in order, when they are first met; they stay until the process
//! detaches. Nothing of it is there in forked children (`MADV_DONTFORK`).

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use tidekv_fork::Birth;

/// Addresses that are this attachment's until it is dropped.
#[derive(Debug)]
pub(super) struct Window {
    /// What was mapped, for unmapping.
    whole: NonNull<c_void>,
    whole_bytes: usize,
    /// Aligned.
    start: NonNull<u8>,
    bytes: usize,
    birth: Birth,
}

// SAFETY: a window is a range of addresses; what lies there is shared memory that is accessed through atomics or by
// callers who promise to keep apart.
unsafe impl Send for Window {}
// SAFETY: as above; mapping into it goes through `&self` and is done by the kernel.
unsafe impl Sync for Window {}

impl Window {
    /// Reserves addresses that begin at a multiple of `align`.
    pub(super) fn reserve(bytes: usize, align: usize) -> Result<Self, Errno> {
        let whole_bytes = bytes.checked_add(align).ok_or(Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses where, so nothing that exists is touched.
        let whole = unsafe { mmap_anonymous(ptr::null_mut(), whole_bytes, ProtFlags::empty(), flags) }?;
        let whole = NonNull::new(whole).ok_or(Errno::NOMEM)?;
        let skip = whole.cast::<u8>().align_offset(align).min(align);
        // SAFETY: `skip` is at most `align`, and `align` bytes more than `bytes` were reserved.
        let start = unsafe { whole.cast::<u8>().add(skip) };
        let window = Self { whole, whole_bytes, start, bytes, birth: Birth::here() };
        window.keep_from_children(0, bytes)?;
        Ok(window)
    }

    #[inline]
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Maps a part of a file at an offset of the window, for reading and writing.
    pub(super) fn map(&self, at: usize, bytes: usize, file: BorrowedFd<'_>, offset: u64) -> Result<(), Errno> {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.bytes), "outside the window");
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the target lies inside the window, which is ours and never given to anybody else; replacing what is
        // mapped there by the same part of the same file changes nothing for those who use it.
        unsafe { mmap(self.start.as_ptr().wrapping_add(at).cast(), bytes, protection, flags, file, offset) }?;
        self.keep_from_children(at, bytes)
    }

    /// Gives advice about a part of the window.
    pub(super) fn advise(&self, at: usize, bytes: usize, advice: Advice) -> Result<(), Errno> {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.bytes), "outside the window");
        // SAFETY: inside the window; none of the kinds of advice used here (population, huge pages, what children get)
        // changes what the memory contains.
        unsafe { madvise(self.start.as_ptr().wrapping_add(at).cast(), bytes, advice) }
    }

    fn keep_from_children(&self, at: usize, bytes: usize) -> Result<(), Errno> {
        self.advise(at, bytes, Advice::LinuxDontFork)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // In a forked child the addresses may be somebody else's.
        if !self.birth.is_foreign() {
            // SAFETY: this is what was mapped, and whoever used it is gone or holds a borrow that ended.
            let _ = unsafe { munmap(self.whole.as_ptr(), self.whole_bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_file_appears_where_it_is_mapped() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let window = Window::reserve(1 << 30, 2 << 20).unwrap();
        assert_eq!(window.start().as_ptr() as usize % (2 << 20), 0);
        window.map(4096, 8192, file.as_fd(), 0).unwrap();
        // SAFETY: mapped just now.
        let byte = unsafe { window.start().as_ptr().wrapping_add(4096).read() };
        assert_eq!(byte, 0);
        window.advise(4096, 8192, Advice::LinuxPopulateWrite).unwrap();
    }

    #[test]
    #[should_panic(expected = "outside the window")]
    fn nothing_is_mapped_outside() {
        let file = tempfile::tempfile().unwrap();
        let _ = Window::reserve(1 << 20, 4096).unwrap().map(1 << 20, 4096, file.as_fd(), 0);
    }
}
