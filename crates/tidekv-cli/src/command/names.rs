//! `kvctl names`: what installed completions ask, so that they offer the pools that there are now.

use tidekv_shm::RuntimeDir;

use super::shell::complete::{asks_for_pool, pool_names};
use crate::console::Console;
use crate::exit::Outcome;

pub(super) fn run(dir: &RuntimeDir, words: &[String], console: &mut Console) -> anyhow::Result<Outcome> {
    let (asked, folder) = if words.is_empty() { (true, None) } else { asks_for_pool(words) };
    if asked {
        let begin = words.last().map(|word| word.to_lowercase()).unwrap_or_default();
        let names = pool_names(&folder.map_or_else(|| dir.clone(), RuntimeDir::at));
        for name in names.iter().filter(|name| name.to_lowercase().starts_with(&begin)) {
            console.line(name)?;
        }
    }
    Ok(Outcome::Done)
}
