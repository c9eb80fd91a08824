//! The logits of a model folder, for comparison with other implementations: `logits FOLDER CHUNK [BACKEND] < tokens.json`.
//!
//! Reads a list of sequences (`[[1, 2, 3], ...]`) and writes, for each, the logits behind every token, row after row.
//! Prompts are computed `CHUNK` tokens at a time, all sequences in one batch. BACKEND is cpu (default), cuda or cuda:f32.

#[path = "../tests/support/lab.rs"]
mod lab;

use std::io::Write;

use lab::{Home, Lab, MAX_ROWS};
use tidekv_serve::compute::CudaCompute;
use tidekv_serve::compute::cuda::{Device, StepLimits};
use tidekv_serve::config::{ComputeChoice, ModelSource};
use tidekv_serve::model::Model;

/// Tokens of a block.
const BLOCK: u32 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (folder, chunk, backend) = match &arguments[..] {
        [folder, chunk] => (folder, chunk, "cpu"),
        [folder, chunk, backend] => (folder, chunk, backend.as_str()),
        _ => return Err("usage: logits FOLDER CHUNK [BACKEND] < tokens.json".into()),
    };
    let chunk: usize = chunk.parse()?;
    let sequences: Vec<Vec<u32>> = serde_json::from_reader(std::io::stdin().lock())?;
    let model = Model::load(&ModelSource::Folder(folder.into()))?;
    let tokens: usize = sequences.iter().map(|tokens| tokens.len() + BLOCK as usize).sum();
    let tokens = u32::try_from(tokens)?;
    let mut lab = match backend.parse()? {
        ComputeChoice::Cpu => Lab::new(model, 1, BLOCK, tokens)?,
        ComputeChoice::Cuda(precision) => {
            let (device, shape) = (Device::open(0)?, model.shape.clone());
            let limits = StepLimits { max_rows: MAX_ROWS, max_step_tokens: tokens.max(MAX_ROWS) };
            let compute = CudaCompute::new(&device, model, precision, limits)?;
            Lab::with(Box::new(compute), &shape, Home::Gpu(precision), BLOCK, tokens)?
        }
        ComputeChoice::Auto => return Err("BACKEND is cpu, cuda or cuda:f32".into()),
    };
    let logits = lab.logits(&sequences, |_, _| chunk)?;
    serde_json::to_writer(std::io::stdout().lock(), &logits)?;
    std::io::stdout().flush()?;
    Ok(())
}
