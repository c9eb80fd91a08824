//! The logits of a model folder, for comparison with other implementations: `logits FOLDER CHUNK < tokens.json`.
//!
//! Reads a list of sequences (`[[1, 2, 3], ...]`) and writes, for each, the logits behind every token, row after row.
//! Prompts are computed `CHUNK` tokens at a time, all sequences in one batch.

#[path = "../tests/support/lab.rs"]
mod lab;

use std::io::Write;

use tidekv_serve::model::Model;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(folder), Some(chunk)) = (arguments.next(), arguments.next()) else {
        return Err("usage: logits FOLDER CHUNK < tokens.json".into());
    };
    let chunk: usize = chunk.parse()?;
    let sequences: Vec<Vec<u32>> = serde_json::from_reader(std::io::stdin().lock())?;
    let model = Model::load(&tidekv_serve::config::ModelSource::Folder(folder.into()))?;
    let tokens: usize = sequences.iter().map(|tokens| tokens.len() + 16).sum();
    let mut lab = lab::Lab::new(model, 1, 16, u32::try_from(tokens)?)?;
    let logits = lab.logits(&sequences, |_, _| chunk)?;
    serde_json::to_writer(std::io::stdout().lock(), &logits)?;
    std::io::stdout().flush()?;
    Ok(())
}
