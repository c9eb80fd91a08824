//! SIGTERM and Ctrl-C: the first one drains, the second one ends the process as if nobody had caught it.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};
use tidekv_serve::server::Stop;

/// From now on.
pub(super) fn stop_on_signal(stop: Stop) -> io::Result<()> {
    let (mut came, comes) = UnixStream::pair()?;
    let is_second = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // Run in this order by every signal: looks whether it is the second, then makes the next one so.
        flag::register_conditional_default(signal, Arc::clone(&is_second))?;
        flag::register(signal, Arc::clone(&is_second))?;
        low_level::pipe::register(signal, comes.try_clone()?)?;
    }
    std::thread::Builder::new().name("kvserve-signals".to_owned()).spawn(move || {
        let mut byte = [0];
        // The other end lives as long as the process: only a signal ends this.
        if came.read_exact(&mut byte).is_ok() {
            stop.stop();
        }
    })?;
    Ok(())
}
