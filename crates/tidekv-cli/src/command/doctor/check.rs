//! One judgement, and the list of all kinds of them.
//!
//! Ids are for scripts: they are never renamed. A kind that judges several things (GPUs, variables) gives a check for
//! each, told apart by the subject.

use serde::Serialize;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Status {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// To be mended.
    Finding,
    /// Not looked at.
    Skipped,
}

/// What a check is about, in the order of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Group {
    Gpu,
    SharedFiles,
    HostMemory,
    Cpu,
    Container,
    Environment,
}

impl Group {
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::SharedFiles => "Shared files",
            Self::HostMemory => "Host memory",
            Self::Cpu => "CPU",
            Self::Container => "Container",
            Self::Environment => "Environment",
        }
    }
}

/// A judgement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    pub(super) id: &'static str,
    pub(super) group: Group,
    pub(super) title: &'static str,
    /// Which of several: `GPU 0`, a variable's name.
    pub(super) subject: Option<String>,
    pub(super) status: Status,
    /// What was seen; for a skipped check, why nothing was.
    pub(super) what: String,
    /// What follows from it.
    pub(super) means: Option<String>,
    /// What to type, or to do. Every finding has one; a note may.
    pub(super) fix: Option<String>,
}

impl Check {
    #[must_use]
    pub(super) fn about(self, subject: impl Into<String>) -> Self {
        Self { subject: Some(subject.into()), ..self }
    }

    /// A way to change what a note says, for those who want to.
    #[must_use]
    pub(super) fn advice(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..self }
    }
}

/// A kind of check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) id: &'static str,
    group: Group,
    title: &'static str,
}

impl Kind {
    const fn new(group: Group, id: &'static str, title: &'static str) -> Self {
        Self { id, group, title }
    }

    pub(super) fn ok(self, what: impl Into<String>) -> Check {
        self.check(Status::Ok, what.into())
    }

    pub(super) fn note(self, what: impl Into<String>, means: impl Into<String>) -> Check {
        Check { means: Some(means.into()), ..self.check(Status::Note, what.into()) }
    }

    pub(super) fn finding(self, what: impl Into<String>, means: impl Into<String>, fix: impl Into<String>) -> Check {
        Check { means: Some(means.into()), fix: Some(fix.into()), ..self.check(Status::Finding, what.into()) }
    }

    pub(super) fn skipped(self, why: impl Into<String>) -> Check {
        self.check(Status::Skipped, why.into())
    }

    fn check(self, status: Status, what: String) -> Check {
        let Self { id, group, title } = self;
        Check { id, group, title, subject: None, status, what, means: None, fix: None }
    }
}

macro_rules! kinds {
    ($($name:ident = $group:ident, $id:literal, $title:literal;)*) => {
        $(pub(super) const $name: Kind = Kind::new(Group::$group, $id, $title);)*
        /// Every kind, in the order of the report.
        #[cfg(test)]
        pub(super) const ALL: &[Kind] = &[$($name),*];
    };
}

kinds! {
    DRIVER = Gpu, "driver", "driver";
    GPUS = Gpu, "gpus", "GPUs";
    GPU_COMPUTE_MODE = Gpu, "gpu-compute-mode", "compute mode";
    GPU_MIG = Gpu, "gpu-mig", "MIG";
    GPU_PERSISTENCE = Gpu, "gpu-persistence", "persistence";
    GPU_MEMORY = Gpu, "gpu-memory", "memory for pools";
    GPU_USERS = Gpu, "gpu-users", "other users";
    RUNTIME_DIR = SharedFiles, "runtime-dir", "folder";
    RUNTIME_DIR_FILESYSTEM = SharedFiles, "runtime-dir-filesystem", "file system";
    RUNTIME_DIR_MODE = SharedFiles, "runtime-dir-mode", "mode";
    RUNTIME_DIR_SPACE = SharedFiles, "runtime-dir-space", "space";
    RUNTIME_DIR_FILES = SharedFiles, "runtime-dir-files", "others' files";
    LEDGERS = SharedFiles, "ledgers", "ledgers";
    LEDGERS_ELSEWHERE = SharedFiles, "ledgers-elsewhere", "other ledgers";
    LEFTOVERS = SharedFiles, "leftovers", "left behind";
    KVCACHED_SEGMENTS = SharedFiles, "kvcached-segments", "kvcached's own";
    HOST_FREE = HostMemory, "host-memory", "free memory";
    HUGE_PAGES = HostMemory, "huge-pages", "huge pages";
    MEMLOCK = HostMemory, "memlock", "locked memory";
    ADDRESS_SPACE = HostMemory, "address-space", "address space";
    MAX_MAP_COUNT = HostMemory, "max-map-count", "mappings";
    OVERCOMMIT = HostMemory, "overcommit", "overcommit";
    CPU_GOVERNOR = Cpu, "cpu-governor", "governor";
    CPU_AFFINITY = Cpu, "cpu-affinity", "affinity";
    CGROUP_MEMORY = Container, "cgroup-memory", "memory limit";
    CGROUP_CPU = Container, "cgroup-cpu", "CPU quota";
    CGROUP_PIDS = Container, "cgroup-pids", "process limit";
    ENVIRONMENT = Environment, "environment", "variables";
    VERSIONS = Environment, "versions", "versions";
}
