//! The heap of this process, where the C library keeps what was freed.

#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE_BYTES: libc::c_int = 1 << 20;

/// From here on, blocks of a MiB and more go back to the system when they are freed. glibc otherwise raises that bound to 32 MiB once
/// such a block was freed, and keeps twice as much at the end of every thread's heap.
pub fn return_large_blocks_at_once() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for name in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: mallopt takes two numbers and locks the heap; a value that it does not know changes nothing.
        unsafe {
            libc::mallopt(name, LARGE_BYTES);
        }
    }
}

/// Gives freed memory of the heap back to the system, also from between blocks that are in use. It takes milliseconds, so it belongs on
/// a thread that nobody waits for.
pub fn release_freed_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim takes no pointer and locks what it looks at; every state of the heap is valid for it.
    unsafe {
        libc::malloc_trim(0);
    }
}
