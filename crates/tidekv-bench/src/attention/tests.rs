//! A card whose speeds are known.

use std::time::Duration;

use clap::Parser as _;
use serde_json::Value;
use tidekv_core::units::Bytes;

use super::measure::{Attention, Card, Plain, measure};
use super::*;
use crate::host::HostInfo;
use crate::progress::Progress;

/// Reads 4 GB/s, copies 2 GB/s, attends at three quarters of its reading where chunks are small, and at half elsewhere.
struct Card4 {
    free: Bytes,
}

struct Memory(Bytes);
struct Step {
    bytes: Bytes,
    gb_per_s: f64,
}

fn at(bytes: Bytes, gb_per_s: f64) -> anyhow::Result<Duration> {
    Ok(Duration::from_secs_f64(bytes.0 as f64 / gb_per_s / 1e9))
}

impl Card for Card4 {
    fn host(&self) -> HostInfo {
        HostInfo::current()
    }

    fn kv_bytes(&self, cell: Cell) -> Bytes {
        Bytes(u64::from(cell.batch) * u64::from(cell.context) * 131_072)
    }

    fn free(&self) -> anyhow::Result<Bytes> {
        Ok(self.free)
    }

    fn plain(&self, bytes: Bytes) -> anyhow::Result<Box<dyn Plain>> {
        Ok(Box::new(Memory(bytes)))
    }

    fn attention(&self, cell: Cell, variant: Variant) -> anyhow::Result<Box<dyn Attention>> {
        let gb_per_s = match variant.chunk.0 >> 10 {
            128 => 3.0,
            256 | 512 => 3.06,
            _ => 2.0,
        };
        Ok(Box::new(Step { bytes: self.kv_bytes(cell), gb_per_s }))
    }
}

impl Plain for Memory {
    fn bytes(&self) -> Bytes {
        self.0
    }

    fn time_read(&self) -> anyhow::Result<Duration> {
        at(self.0, 4.0)
    }

    fn time_copy(&self) -> anyhow::Result<Duration> {
        at(self.0, 2.0)
    }
}

impl Attention for Step {
    fn page_bytes(&self) -> Bytes {
        Bytes::mib(8)
    }

    fn time(&self) -> anyhow::Result<Duration> {
        at(self.bytes, self.gb_per_s)
    }
}

fn plan(line: &str) -> anyhow::Result<Plan> {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: AttentionArgs,
    }
    let words = std::iter::once("attention").chain(line.split_whitespace());
    Plan::of(&Line::try_parse_from(words)?.args)
}

fn result(line: &str, free: Bytes) -> anyhow::Result<(Value, String)> {
    let plan = plan(line)?;
    let measured = measure(&plan, &Card4 { free }, &Progress::hidden())?;
    let mut result = BenchResult::new("attention", &plan, HostInfo::current())?;
    report::fill(&mut result, &measured);
    let text = report::tables(&measured);
    Ok((serde_json::from_str(&result.to_json()?)?, text))
}

fn near(found: &Value, wanted: f64) {
    let found = found.as_f64().unwrap();
    assert!((found - wanted).abs() < 1e-3 * wanted.abs().max(1e-3), "{found} is not {wanted}");
}

#[test]
fn figures_are_those_of_the_card() {
    let (result, text) = result("--batch 1,64 --context 1024,4096 --samples 3", Bytes::gib(100)).unwrap();
    let summary = &result["summary"];
    near(&summary["read_gb_per_s"], 4.0);
    near(&summary["share_of_read"], 0.5);
    near(&summary["slab_2m_share_of_read"], 0.5);
    near(&summary["chunk_spread"], 0.02);
    let cells = summary["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 4);
    for cell in cells {
        near(&cell["copy_gb_per_s"], 2.0);
        assert_eq!(cell["layouts"].as_array().unwrap().len(), 7);
        near(&cell["layouts"][0]["share_of_read"], 0.75);
        near(&cell["layouts"][0]["time_over_copy"], 2.0 / 3.0);
    }
    assert_eq!(cells[3]["kv_bytes"], 64 * 4096 * 131_072_u64);
    assert_eq!(result["samples"]["64x4096.slab-128-KiB.attention"]["count"], 3, "{}", result["samples"]);
    assert!(text.contains("64 x 4096: 34.4 GB of keys and values; read alone 4.00 GB/s"), "{text}");
    assert!(text.contains("slab chunks up to 512 KiB: 2.0 % from the slowest to the fastest"), "{text}");
}

#[test]
fn what_does_not_fit_is_left_out_and_named() {
    let (result, _) = result("--batch 1,64 --context 4096 --samples 1", Bytes::gib(24)).unwrap();
    assert_eq!(result["summary"]["left_out"][0], "64 x 4096");
    assert_eq!(result["summary"]["cells"].as_array().unwrap().len(), 1);
    let nothing = super::tests::result("--batch 64 --context 4096", Bytes::gib(1)).unwrap_err().to_string();
    assert!(nothing.contains("no cell fits"), "{nothing}");
}

#[test]
fn one_chunk_has_no_spread() {
    let (result, text) = result("--quick --layout slab,interleaved --chunk 256K", Bytes::gib(100)).unwrap();
    assert_eq!(result["summary"].get("chunk_spread"), None);
    assert_eq!(result["summary"].get("slab_2m_share_of_read"), None);
    assert!(!text.contains("from the slowest"), "{text}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (line, part) in [
        ("--batch 0", "--batch has 0"),
        ("--context 2000000", "--context has 2000000"),
        ("--samples 0", "--samples has 0"),
        ("--block-size 24", "--block-size is 24"),
        ("--layout flat", "not a layout"),
        ("--backend cpu", "invalid value 'cpu'"),
    ] {
        let error = plan(line).unwrap_err().to_string();
        assert!(error.contains(part), "{line}: {error}");
    }
}
