//! Which rank works on which device.

use anyhow::Context;
use clap::ValueEnum;
use serde::Serialize;
use tidekv_mem::BackendName;

/// How ranks are spread over devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceMode {
    /// Rank n on device n, modulo the number of devices
    PerRank,
    /// All ranks on device 0
    Same,
}

/// The device of every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DeviceMap {
    /// Of rank 0, 1, ...
    pub(crate) devices: Vec<u32>,
    /// How many the back-end has.
    pub(crate) device_count: u32,
    /// What the user should know about it, in one sentence.
    pub(crate) device_warning: Option<String>,
}

impl DeviceMap {
    /// Spreads `ranks` over the devices of a back-end.
    pub(crate) fn new(mode: DeviceMode, flag: &str, ranks: u32, backend: BackendName) -> anyhow::Result<Self> {
        let count = tidekv_mem::device_count(backend).context("counting devices")?;
        Ok(Self::over(mode, flag, ranks, count))
    }

    fn over(mode: DeviceMode, flag: &str, ranks: u32, device_count: u32) -> Self {
        // Nothing opens without a device, so what counts as one here never matters.
        let count = device_count.max(1);
        let devices = match mode {
            DeviceMode::PerRank => (0..ranks).map(|rank| rank % count).collect(),
            DeviceMode::Same => vec![0; ranks as usize],
        };
        let crowded = mode == DeviceMode::PerRank && ranks > count;
        let device_warning = crowded.then(|| {
            let devices = if count == 1 { "1 device".to_owned() } else { format!("{count} devices") };
            format!("{ranks} ranks and {devices}: rank r works on device r modulo {count} ({flag} same puts all on device 0)")
        });
        Self { devices, device_count, device_warning }
    }

    /// Every device that a rank works on, with the ranks that do.
    pub(crate) fn ranks_by_device(&self) -> impl Iterator<Item = (u32, Vec<usize>)> {
        let last = self.devices.iter().copied().max().map_or(0, |last| last + 1);
        (0..last).map(|device| {
            let ranks = self.devices.iter().enumerate().filter(move |(_, of_rank)| **of_rank == device);
            (device, ranks.map(|(rank, _)| rank).collect())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_wrap_around_with_one_warning() {
        let map = DeviceMap::over(DeviceMode::PerRank, "--device-mode", 5, 2);
        assert_eq!(map.devices, [0, 1, 0, 1, 0]);
        let warning = map.device_warning.clone().unwrap();
        assert!(warning.starts_with("5 ranks and 2 devices: rank r works on device r modulo 2"), "{warning}");
        assert!(!warning.contains('\n') && warning.contains("--device-mode same"), "{warning}");
        let by_device: Vec<_> = map.ranks_by_device().collect();
        assert_eq!(by_device, [(0, vec![0, 2, 4]), (1, vec![1, 3])]);
    }

    #[test]
    fn enough_devices_and_one_device_by_choice_are_no_reason_to_warn() {
        let enough = DeviceMap::over(DeviceMode::PerRank, "--device-mode", 4, 8);
        assert_eq!((&enough.devices[..], enough.device_warning), (&[0, 1, 2, 3][..], None));
        let same = DeviceMap::over(DeviceMode::Same, "--device-mode", 4, 1);
        assert_eq!((&same.devices[..], same.device_warning), (&[0; 4][..], None));
    }
}
