//! How much KV memory a server holds and how much of that requests use, while it is measured.
//!
//! ```text
//!   held    mapped_bytes                                          memory that nobody else can have
//!   in use  (allocated - cached blocks) of the blocks under the limit     what running requests need of it
//! ```
//!
//! Both are what the server's `/metrics` says, looked at a few times a second by a thread of its own. Every look asks all
//! servers at the same moment, so that sums over servers are sums of what was there together: the peak of the sums, and
//! not the sum of peaks that never met. A server without such metrics (vLLM, SGLang without us) has no figures here, and
//! none are made up.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::session::Session;
use crate::load::BaseUrl;
use crate::stats::to_f64;

const LOOK_EVERY: Duration = Duration::from_millis(100);
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// Memory at one moment, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KvUse {
    /// What requests use.
    pub used: f64,
    /// What the pool holds.
    pub held: f64,
}

impl KvUse {
    /// What a page of metrics says, if it says anything about a pool.
    pub fn of_metrics(page: &str) -> Option<Self> {
        let pool = |name: &str| value_of(page, &format!("kvcached_kv_cache_pool_{name}"));
        let (total, limit) = (pool("total_blocks")?, pool("limit_bytes")?);
        let busy = (pool("allocated_blocks")? - pool("cached_blocks")?).max(0.0);
        let used = if total > 0.0 { busy / total * limit } else { 0.0 };
        Some(Self { used, held: pool("mapped_bytes")? })
    }
}

/// The least that a server maps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvPage {
    bytes: f64,
    tokens: f64,
}

impl KvPage {
    /// What a page of metrics says, if it says anything about a pool.
    pub fn of_metrics(page: &str) -> Option<Self> {
        let pool = |name: &str| value_of(page, &format!("kvcached_kv_cache_pool_{name}")).filter(|&value| value > 0.0);
        Some(Self { bytes: pool("page_bytes")?, tokens: pool("page_tokens")? })
    }

    /// What a request of so many tokens needs.
    pub fn bytes_of(&self, tokens: u32) -> f64 {
        (f64::from(tokens) / self.tokens).ceil() * self.bytes
    }
}

/// The value of a gauge, whatever its labels are.
fn value_of(page: &str, name: &str) -> Option<f64> {
    let line = page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])))?;
    line.rsplit_once(' ')?.1.trim().parse().ok()
}

/// Memory over a while: means and peaks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemorySummary {
    /// Means.
    pub mean: KvUse,
    /// Peaks.
    pub peak: KvUse,
}

impl MemorySummary {
    /// Of some looks; `None` without any.
    pub fn of(looks: &[KvUse]) -> Option<Self> {
        let count = to_f64(u64::try_from(looks.len()).ok().filter(|&count| count > 0)?);
        let sum = looks
            .iter()
            .fold(KvUse::default(), |sum, look| KvUse { used: sum.used + look.used, held: sum.held + look.held });
        let peak = |of: fn(&KvUse) -> f64| looks.iter().map(of).fold(0.0, f64::max);
        let mean = KvUse { used: sum.used / count, held: sum.held / count };
        Some(Self { mean, peak: KvUse { used: peak(|look| look.used), held: peak(|look| look.held) } })
    }

    /// Of several whiles of equal length; `None` without any.
    pub fn over(whiles: impl Iterator<Item = Self>) -> Option<Self> {
        let whiles: Vec<Self> = whiles.collect();
        let means: Vec<KvUse> = whiles.iter().map(|one| one.mean).collect();
        let peaks: Vec<KvUse> = whiles.iter().map(|one| one.peak).collect();
        Some(Self { mean: Self::of(&means)?.mean, peak: Self::of(&peaks)?.peak })
    }

    /// Mean in use over mean held.
    pub fn utilization(&self) -> Option<f64> {
        (self.mean.held > 0.0).then(|| self.mean.used / self.mean.held)
    }
}

/// What was seen of some servers, look by look; `None` where a server did not say.
#[derive(Clone, Debug, Default)]
pub struct Looks(Vec<Vec<Option<KvUse>>>);

impl Looks {
    /// Of one server.
    pub fn of(&self, server: usize) -> Vec<KvUse> {
        self.0.iter().filter_map(|look| *look.get(server)?).collect()
    }

    /// Of all servers together. A look that one of them did not answer does not count.
    pub fn together(&self) -> Vec<KvUse> {
        let add = |sum: KvUse, one: &Option<KvUse>| {
            one.map(|one| KvUse { used: sum.used + one.used, held: sum.held + one.held })
        };
        self.0.iter().filter_map(|look| look.iter().try_fold(KvUse::default(), add)).collect()
    }
}

/// A thread that looks at servers until it is asked what it saw.
#[derive(Debug)]
pub struct Watch {
    stop: Sender<()>,
    looks: JoinHandle<Looks>,
}

impl Watch {
    /// Begins to look at each of `urls`.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn begin(session: &Session, urls: Vec<BaseUrl>) -> std::io::Result<Self> {
        let session = session.clone();
        let (stop, stopped) = channel();
        let looks =
            thread::Builder::new().name("watch-memory".to_owned()).spawn(move || look(&session, &urls, &stopped))?;
        Ok(Self { stop, looks })
    }

    /// What was seen.
    pub fn end(self) -> Looks {
        drop(self.stop);
        self.looks.join().unwrap_or_default()
    }
}

fn look(session: &Session, urls: &[BaseUrl], stopped: &Receiver<()>) -> Looks {
    let mut looks = Looks::default();
    loop {
        let pages = session.pages(urls, "/metrics", LOOK_TIMEOUT);
        looks.0.push(pages.iter().map(|page| page.as_deref().and_then(KvUse::of_metrics)).collect());
        if stopped.recv_timeout(LOOK_EVERY) != Err(RecvTimeoutError::Timeout) {
            return looks;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_ours_and_one_of_others() {
        let page = "# TYPE x gauge\n\
            kvcached_kv_cache_pool_allocated_blocks{kv_mode=\"elastic\"} 30\n\
            kvcached_kv_cache_pool_cached_blocks{kv_mode=\"elastic\"} 10\n\
            kvcached_kv_cache_pool_total_blocks{kv_mode=\"elastic\"} 100\n\
            kvcached_kv_cache_pool_mapped_bytes{kv_mode=\"elastic\"} 4096\n\
            kvcached_kv_cache_pool_limit_bytes{kv_mode=\"elastic\"} 10000\n";
        assert_eq!(KvUse::of_metrics(page), Some(KvUse { used: 2000.0, held: 4096.0 }));
        assert_eq!(KvUse::of_metrics("vllm:num_requests_running 3\n"), None);
        assert_eq!(value_of("a_b 1\na 2\n", "a"), Some(2.0));
    }

    #[test]
    fn a_request_takes_whole_pages() {
        let page = "kvcached_kv_cache_pool_page_bytes 4096\nkvcached_kv_cache_pool_page_tokens 32\n";
        let page = KvPage::of_metrics(page).unwrap();
        assert_eq!([1, 32, 33, 96].map(|tokens| page.bytes_of(tokens)), [4096.0, 4096.0, 8192.0, 12288.0]);
        assert_eq!(KvPage::of_metrics("kvcached_kv_cache_pool_page_bytes 4096\n"), None);
        assert_eq!(
            KvPage::of_metrics("kvcached_kv_cache_pool_page_bytes 0\nkvcached_kv_cache_pool_page_tokens 0\n"),
            None
        );
    }

    #[test]
    fn means_peaks_and_nothing() {
        let looks = [KvUse { used: 1.0, held: 4.0 }, KvUse { used: 3.0, held: 4.0 }];
        let summary = MemorySummary::of(&looks).unwrap();
        assert_eq!((summary.mean.used, summary.peak.used, summary.utilization()), (2.0, 3.0, Some(0.5)));
        assert_eq!(MemorySummary::of(&[]), None);
    }

    /// Three models that are busy one after the other hold no more together than one of them does alone.
    #[test]
    fn the_peak_of_sums_is_not_the_sum_of_peaks() {
        let at = |held: f64| Some(KvUse { used: held / 2.0, held });
        let looks = Looks(vec![
            vec![at(6.0), at(1.0), at(1.0)],
            vec![at(1.0), at(6.0), at(1.0)],
            // Nobody knows what the second held: the sum would be too small.
            vec![at(9.0), None, at(9.0)],
        ]);
        let together = MemorySummary::of(&looks.together()).unwrap();
        assert_eq!((together.peak.held, together.mean.held, together.peak.used), (8.0, 8.0, 4.0));
        assert_eq!(looks.of(1), [at(1.0).unwrap(), at(6.0).unwrap()]);
        assert_eq!(looks.of(7), []);
        assert!(Looks::default().together().is_empty());
    }
}
