//! Rotary positions: how fast each pair of a head's elements turns with the position.
//!
//! ```text
//!   pair i of head_size / 2     angle = position * frequency[i]       frequency[i] = theta ^ (-2i / head_size)
//!   llama3 scaling              fast pairs as they are | a slope between | slow pairs `factor` times slower
//! ```
//!
//! The angles are 32-bit floats all the way, as in the frameworks that the models were trained with: more precision
//! would be another model.

/// How positions turn queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The slowest pair turns about once in `2 pi theta` positions.
    pub theta: f32,
    /// How the frequencies are stretched for longer contexts.
    pub scaling: RopeScaling,
}

/// How frequencies are stretched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every pair `factor` times slower.
    Linear {
        /// How much.
        factor: f32,
    },
    /// Slow pairs `factor` times slower, fast ones not at all.
    Llama3 {
        /// How much.
        factor: f32,
        /// Waves longer than `original_context / low_frequency_factor` are slow.
        low_frequency_factor: f32,
        /// Waves shorter than `original_context / high_frequency_factor` are fast.
        high_frequency_factor: f32,
        /// Context before stretching.
        original_context: f32,
    },
}

impl Rope {
    /// The frequency of each pair of a head.
    #[expect(clippy::cast_precision_loss, reason = "head sizes are small")]
    pub fn frequencies(&self, head_size: usize) -> Vec<f32> {
        let plain = |pair: usize| 1.0 / self.theta.powf((2 * pair) as f32 / head_size as f32);
        (0..head_size / 2).map(|pair| self.scaling.stretch(plain(pair))).collect()
    }
}

impl RopeScaling {
    fn stretch(self, frequency: f32) -> f32 {
        match self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                let wave = 2.0 * std::f32::consts::PI / frequency;
                if wave < original_context / high_frequency_factor {
                    frequency
                } else if wave > original_context / low_frequency_factor {
                    frequency / factor
                } else {
                    let span = high_frequency_factor - low_frequency_factor;
                    let fast = (original_context / wave - low_frequency_factor) / span;
                    (1.0 - fast) * frequency / factor + fast * frequency
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_leaves_fast_pairs_alone_and_slows_slow_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context: 8192.0,
        };
        let plain = Rope { theta: 500_000.0, scaling: RopeScaling::None }.frequencies(128);
        let stretched = Rope { theta: 500_000.0, scaling }.frequencies(128);
        assert_eq!(plain[0].to_bits(), stretched[0].to_bits());
        assert!((plain[63] / stretched[63] - 8.0).abs() < 1e-5);
        assert!(plain.iter().zip(&stretched).all(|(plain, slow)| slow <= plain && *slow >= plain / 8.01));
        assert!(stretched.windows(2).all(|pair| pair[0] > pair[1]), "the slope is monotonic");
    }
}
