//! `kvtop --once`: devices and pools as plain tables, for pipes and for people in a hurry.

use tidekv_core::units::Bytes;

use super::collect::{DeviceSample, Sample};
use crate::command::table::{STANDING, Table};
use crate::console::{Colour, Console};
use crate::scene::Pool;
use crate::text::{cut_middle, fit, kvcached_size};

/// What the six figures of a device take.
const FIGURES: usize = 6 * 11;

pub(super) fn print(sample: &Sample, pools: &[&Pool], console: &mut Console) -> anyhow::Result<()> {
    if !sample.devices.is_empty() {
        devices(&sample.devices, console)?;
        console.line("")?;
    }
    if pools.is_empty() {
        console.line("No active KVCached segments found.")?;
    } else {
        Table::new(pools.iter().map(|&pool| pool.into()).collect(), STANDING, console.width()).print(console)?;
    }
    Ok(())
}

fn devices(devices: &[DeviceSample], console: &mut Console) -> anyhow::Result<()> {
    let longest = devices.iter().map(|device| device.name.as_str().len()).max().unwrap_or(0).max("Device".len());
    let room = console.width().map_or(longest, |width| width.saturating_sub(FIGURES).clamp("Device".len(), longest));
    let row = |name: &str, figures: [String; 6]| {
        figures.iter().fold(fit(&cut_middle(name, room), room), |line, figure| format!("{line} {figure:>10}"))
    };
    let header = row("Device", ["Total", "Held", "Idle", "Other", "Free", "Budget"].map(str::to_owned));
    console.line(console.paint(&header, Colour::BoldCyan))?;
    let size = |bytes: Bytes| kvcached_size(i64::try_from(bytes.0).unwrap_or(i64::MAX));
    for device in devices {
        let figures = [device.total, device.held(), device.usage.idle, device.non_pool, device.free, device.budget];
        console.line(row(device.name.as_str(), figures.map(size)))?;
    }
    Ok(())
}
