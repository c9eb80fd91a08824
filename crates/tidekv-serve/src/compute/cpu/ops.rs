//! What happens to one row at a time: norms, turning by position, the gate. Sums run over fixed lanes, so that a result
//! is one chain of operations whatever the compiler makes of it.

/// Sums kept side by side; the processor adds so many at once.
const LANES: usize = 16;

/// The sum of products.
#[inline]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a * b;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `out += scale * row`.
#[inline]
pub(super) fn add_scaled(out: &mut [f32], scale: f32, row: &[f32]) {
    out.iter_mut().zip(row).for_each(|(out, element)| *out += scale * element);
}

/// Divides a row by the root of its mean square and multiplies it with `weight`.
#[expect(clippy::cast_precision_loss, reason = "rows have at most 2^24 elements")]
pub(super) fn norm(row: &mut [f32], weight: &[f32], epsilon: f32) {
    let scale = 1.0 / (dot(row, row) / row.len() as f32 + epsilon).sqrt();
    row.iter_mut().zip(weight).for_each(|(element, weight)| *element = weight * (*element * scale));
}

/// Every row of `from` through [`norm`] to `out`.
pub(super) fn norm_rows(from: &[f32], weight: &[f32], epsilon: f32, out: &mut Vec<f32>) {
    out.clear();
    out.extend_from_slice(from);
    out.chunks_exact_mut(weight.len()).for_each(|row| norm(row, weight, epsilon));
}

/// Cosines and sines of one position's angles.
pub(super) fn angles(position: i32, frequencies: &[f32], out: &mut Vec<(f32, f32)>) {
    #[expect(clippy::cast_precision_loss, reason = "contexts end at 2^24")]
    let position = position as f32;
    out.extend(frequencies.iter().map(|frequency| {
        let (sin, cos) = (position * frequency).sin_cos();
        (cos, sin)
    }));
}

/// Turns a head: element `i` with element `i + half`.
pub(super) fn turn(head: &mut [f32], angles: &[(f32, f32)]) {
    let (low, high) = head.split_at_mut(angles.len());
    for ((low, high), &(cos, sin)) in low.iter_mut().zip(high).zip(angles) {
        (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
    }
}

/// `silu(gate) * up` of rows that have both side by side.
pub(super) fn gate(gate_up: &[f32], intermediate: usize, out: &mut Vec<f32>) {
    out.clear();
    for row in gate_up.chunks_exact(2 * intermediate) {
        let (gate, up) = row.split_at(intermediate);
        out.extend(gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dot_product_of_any_length() {
        for len in 0..70 {
            let a: Vec<f32> = (0..len).map(|i| (i % 7) as f32).collect();
            let plain: f32 = a.iter().map(|x| x * x).sum();
            assert_eq!(dot(&a, &a), plain, "small integers are exact");
        }
    }

    #[test]
    fn turning_keeps_lengths_and_position_zero_does_nothing() {
        let head: Vec<f32> = (0..8).map(|i| i as f32 - 3.0).collect();
        for position in [0, 1, 1000] {
            let (mut turned, mut table) = (head.clone(), Vec::new());
            angles(position, &[1.0, 0.1, 0.01, 0.001], &mut table);
            turn(&mut turned, &table);
            assert!((dot(&turned, &turned) - dot(&head, &head)).abs() < 1e-4);
            assert_eq!(turned == head, position == 0);
        }
    }
}
