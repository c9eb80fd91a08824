//! Matrix products whose rows do not know of each other.
//!
//! ```text
//!   rows of the step   [ 16 rows ][ 16 rows ][ 5 rows + 11 of zeros ]
//!   weight             [ in x 256 ][ in x 256 ][ in x the rest ]             every product: [16, in] x [in, a panel]
//! ```
//!
//! The library (gemm) is free to choose another kernel, another blocking and so another order of additions for each shape.
//! So there is one shape for each part of a weight: sixteen rows, padded. Within it each element is its own chain of
//! additions in the same order, whichever of the rows it stands in; `tests/rows.rs` holds that to the last bit. Threads
//! share the panels, whose borders do not depend on how many threads there are. Decision 0015 has the measurements.

use gemm::{Parallelism, gemm};
use rayon::prelude::*;

use super::threads::Threads;
use crate::model::{Linear, Matrix};

/// Rows of every product. Fewer waste less of a small step; more read the weights less often in a long one.
const TILE: usize = 16;

/// Columns of a weight that one thread multiplies at a time.
const PANEL: usize = 256;

/// `out = in * weight + bias`.
#[derive(Debug)]
pub(super) struct Dense {
    /// `[in, PANEL]` each; the last may be narrower.
    panels: Vec<Matrix>,
    bias: Option<Vec<f32>>,
    inputs: usize,
    outputs: usize,
}

impl Dense {
    /// # Panics
    /// For a weight that has not as many elements as its sizes say.
    pub(super) fn new(linear: Linear) -> Self {
        let Linear { weight, bias } = linear;
        let Matrix { rows: inputs, columns: outputs, data } = weight;
        assert_eq!(data.len(), inputs * outputs, "a matrix has all its elements");
        let panel = |start: usize| {
            let columns = PANEL.min(outputs - start);
            let data = data.chunks_exact(outputs).flat_map(|row| row[start..start + columns].iter().copied());
            Matrix { rows: inputs, columns, data: data.collect() }
        };
        Self { panels: (0..outputs).step_by(PANEL).map(panel).collect(), bias, inputs, outputs }
    }

    /// Multiplies every row of `rows` and puts the results into `out`, whatever was there.
    pub(super) fn apply(&self, threads: &Threads, rows: &[f32], out: &mut Vec<f32>) {
        let count = rows.len() / self.inputs;
        let mut padded = Vec::with_capacity(count.next_multiple_of(TILE) * self.inputs);
        padded.extend_from_slice(rows);
        padded.resize(count.next_multiple_of(TILE) * self.inputs, 0.0);
        let multiplications = padded.len() * self.outputs;
        let product = |panel: &Matrix| {
            let mut product = vec![0.0; padded.len() / self.inputs * panel.columns];
            let tiles = padded.chunks_exact(TILE * self.inputs).zip(product.chunks_exact_mut(TILE * panel.columns));
            tiles.for_each(|(rows, out)| multiply(rows, panel, out));
            product
        };
        let products: Vec<Vec<f32>> = threads.run(multiplications, || self.panels.par_iter().map(product).collect());
        out.clear();
        for row in 0..count {
            for (panel, product) in self.panels.iter().zip(&products) {
                out.extend_from_slice(&product[row * panel.columns..][..panel.columns]);
            }
        }
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(self.outputs) {
                row.iter_mut().zip(bias).for_each(|(element, bias)| *element += bias);
            }
        }
    }

    /// Column `id` of the weight: a token's state where head and embedding are one matrix.
    pub(super) fn column(&self, id: usize, out: &mut Vec<f32>) {
        let panel = &self.panels[id / PANEL];
        out.extend(panel.data[id % PANEL..].iter().step_by(panel.columns));
    }
}

/// `out = rows * weight`, all of them row after row, on this thread.
fn multiply(rows: &[f32], weight: &Matrix, out: &mut [f32]) {
    let (inputs, outputs) = (weight.rows, weight.columns);
    assert!(rows.len() == TILE * inputs && out.len() == TILE * outputs && weight.data.len() == inputs * outputs);
    let stride = |elements: usize| isize::try_from(elements).expect("a vector's length fits");
    // SAFETY: the three arrays have exactly the elements that their sizes and strides (1 along a row, a row's length from
    // row to row) reach, as asserted above; `out` is borrowed exclusively, so it overlaps neither of the others.
    unsafe {
        gemm(
            TILE,
            outputs,
            inputs,
            out.as_mut_ptr(),
            1,
            stride(outputs),
            false,
            rows.as_ptr(),
            1,
            stride(inputs),
            weight.data.as_ptr(),
            1,
            stride(outputs),
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
