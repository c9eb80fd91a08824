//! The machine and the build that a result came from: enough to know whether two results may be compared.
//!
//! ```text
//!   cpu, cores, memory_bytes, kernel    read from /proc; empty or 0 where it cannot be read
//!   governor                            how the kernel sets clock rates; `performance` is the one to measure with
//!   gpu, driver                         given by a benchmark that opened a device or started a server on one, else absent
//!   commit                              of the source tree, `-dirty` with uncommitted changes (see build.rs)
//!   build                               `release` or `debug`: a debug build is no measurement
//!   date                                when the run started, RFC 3339, UTC, whole seconds
//! ```
//!
//! Nothing here fails: a benchmark on a machine that hides its processor is still a benchmark.

use std::fs;
use std::num::NonZero;
use std::path::Path;
use std::thread;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tidekv_cli::gpu::{GpuReader, GpuReport};
use tidekv_mem::Capabilities;

/// Commit that this binary was built from, or `unknown`.
pub const COMMIT: &str = env!("TIDEKV_COMMIT");

/// The governor that lets a processor run as fast as it can.
pub const PERFORMANCE: &str = "performance";

/// Where and when a benchmark ran. Fields that a file lacks are read as empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostInfo {
    /// Model name of the processor.
    pub cpu: String,
    /// Processors that this process may use.
    pub cores: usize,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// Release of the operating system kernel.
    pub kernel: String,
    /// Governor of the clock rates of the processors that may be used: the first that is not `performance`. Absent
    /// where the kernel has none, as in most virtual machines.
    pub governor: Option<String>,
    /// Model name of the device measured, if one was.
    pub gpu: Option<String>,
    /// Version of its driver.
    pub driver: Option<String>,
    /// Commit of the source tree.
    pub commit: String,
    /// `release` or `debug`.
    pub build: String,
    /// Start of the run.
    pub date: String,
}

impl HostInfo {
    /// This machine, this build, now.
    pub fn current() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self {
            cpu: cpu_model(&read("/proc/cpuinfo")),
            cores: thread::available_parallelism().map_or(0, NonZero::get),
            memory_bytes: memory_bytes(&read("/proc/meminfo")).unwrap_or(0),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            governor: governor(Path::new("/sys/devices/system/cpu")),
            gpu: None,
            driver: None,
            commit: COMMIT.to_owned(),
            build: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
            date: rfc3339_seconds(Timestamp::now()),
        }
    }

    /// The same, for a run on this back-end: with its device and driver, where it has one.
    pub fn with_backend(backend: &Capabilities) -> Self {
        match &backend.driver {
            Some(driver) => Self::current().with_gpu(&backend.device, driver),
            None => Self::current(),
        }
    }

    /// The same, for a run beside these GPUs: with the first of them.
    #[must_use]
    pub fn beside(self, gpus: Option<&GpuReport>) -> Self {
        match gpus.and_then(|report| Some((report.gpus.first()?, report.driver.as_ref()?))) {
            Some((gpu, driver)) => self.with_gpu(&gpu.name, driver),
            None => self,
        }
    }

    /// The same, for a run on a device.
    #[must_use]
    pub fn with_gpu(self, gpu: impl Into<String>, driver: impl Into<String>) -> Self {
        Self { gpu: Some(gpu.into()), driver: Some(driver.into()), ..self }
    }
}

/// What the GPUs say, if there are any.
pub fn gpus() -> Option<GpuReport> {
    GpuReader::open().and_then(|reader| reader.look()).ok().filter(|report| !report.gpus.is_empty())
}

/// The governor of all processors; where they differ, one that is not `performance`.
fn governor(cpus: &Path) -> Option<String> {
    let read = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("cpufreq/scaling_governor")).ok();
    let found = fs::read_dir(cpus).ok()?.filter_map(|entry| Some(read(entry.ok()?)?.trim().to_owned()));
    found.max_by_key(|governor| governor != PERFORMANCE)
}

/// The first model name. Kernels on Arm give none; the architecture is then all there is to say.
fn cpu_model(cpuinfo: &str) -> String {
    value_of(cpuinfo, "model name").unwrap_or(std::env::consts::ARCH).to_owned()
}

fn memory_bytes(meminfo: &str) -> Option<u64> {
    let kib = value_of(meminfo, "MemTotal")?.strip_suffix("kB")?.trim().parse::<u64>().ok()?;
    kib.checked_mul(1024)
}

/// The value of the first `key : value` line of a file in /proc.
fn value_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = pairs.find(|(found, value)| found.trim() == key && !value.trim().is_empty())?;
    Some(value.trim())
}

fn rfc3339_seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_proc_as_kernels_write_them() {
        let cpuinfo =
            "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nprocessor\t: 1\nmodel name\t: other\n";
        assert_eq!(cpu_model(cpuinfo), "AMD EPYC 9654 96-Core Processor");
        assert_eq!(cpu_model("processor\t: 0\nBogoMIPS\t: 50.00\n"), std::env::consts::ARCH);
        assert_eq!(memory_bytes("MemTotal:       16384 kB\nMemFree: 1 kB\n"), Some(16 << 20));
        assert_eq!(memory_bytes("MemTotal: many kB\n"), None);
        assert_eq!(memory_bytes(""), None);
    }

    #[test]
    fn a_governor_that_slows_any_processor_is_found() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(governor(folder.path()), None);
        for (cpu, name) in [("cpu0", "performance"), ("cpu1", "powersave"), ("cpu2", "performance")] {
            let path = folder.path().join(cpu).join("cpufreq");
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("scaling_governor"), format!("{name}\n")).unwrap();
        }
        assert_eq!(governor(folder.path()).as_deref(), Some("powersave"));
        fs::remove_dir_all(folder.path().join("cpu1")).unwrap();
        assert_eq!(governor(folder.path()).as_deref(), Some(PERFORMANCE));
    }

    #[test]
    fn the_date_is_utc_in_whole_seconds() {
        let time: Timestamp = "2026-02-03T04:05:06.789+02:00".parse().unwrap();
        assert_eq!(rfc3339_seconds(time), "2026-02-03T02:05:06Z");
    }

    #[test]
    fn this_machine_has_something_to_say() {
        let host = HostInfo::current();
        assert!(!host.cpu.is_empty() && host.cores > 0 && !host.commit.is_empty());
        assert_eq!((&host.gpu, &host.driver), (&None, &None));
        let date: Timestamp = host.date.parse().unwrap();
        assert!(date <= Timestamp::now());
        let with_gpu = host.with_gpu("H200", "570.1");
        assert_eq!((with_gpu.gpu.as_deref(), with_gpu.driver.as_deref()), (Some("H200"), Some("570.1")));
    }

    #[test]
    fn fields_of_a_later_version_and_missing_ones_are_no_error() {
        let host: HostInfo = serde_json::from_str(r#"{"cpu": "x", "sockets": 2}"#).unwrap();
        assert_eq!((host.cpu.as_str(), host.cores, host.gpu), ("x", 0, None));
    }
}
