//! Text in and out, each kind in its own small module. Nothing here touches a file or a pool.

mod duration;
mod nearest;
mod percent;
mod size;

pub use duration::{DurationError, parse_duration};
pub use nearest::nearest;
pub use percent::{Percent, PercentError};
pub use size::{kvcached_percent, kvcached_size};
