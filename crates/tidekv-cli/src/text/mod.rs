//! Text in and out, each kind in its own small module. Nothing here touches a file or a pool.

mod duration;
mod nearest;
mod percent;
mod printable;
mod size;
mod width;

pub use duration::{DurationError, parse_duration};
pub use nearest::nearest;
pub use percent::{Percent, PercentError};
pub use printable::{is_harmless, printable};
pub use size::{compact_size, kvcached_percent, kvcached_size, percent_tenths};
pub use width::{cut, cut_middle, fit, width, wrap};
