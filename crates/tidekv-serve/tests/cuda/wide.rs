//! Indices above 2^31 and above 2^32: values there are right, and are nobody else's.
//!
//! ```text
//!   an index that loses bits     2^32 + i ──> i          2^31 + i ──> i, or i - 2^31
//! ```
//!
//! A kernel that writes and reads with the same short index finds what it wrote, so it is not enough that a text far behind comes out
//! right. Every case here has the places that a short index would take in use as well, with other values in them.
//!
//! | array                                     | kernels                                      | elements         |
//! |-------------------------------------------|----------------------------------------------|------------------|
//! | keys and values                           | `rope` (writes), `attend`, `merge`, `plain`  | above 2^32       |
//! | embedding and head, made on the device    | `fill`, `embed`, products                    | above 2^32       |
//! | embedding and head, sent by the host      | `convert`, `embed`, products                 | above 2^31       |
//! | logits                                    | products, `best`                             | above 2^32       |
//! | the feed-forward part of a step           | products, `gate`                             | above 2^31       |

use super::*;
use tidekv_serve::compute::Wanted;
use tidekv_serve::model::Draw;

const BORDERS: [u64; 2] = [1 << 31, 1 << 32];

/// The device, where there is time for arrays of gigabytes.
fn large_device(test: &str) -> Option<Device> {
    if std::env::var_os("TIDEKV_SHORT_TESTS").is_some() {
        return None;
    }
    device(test)
}

/// Texts whose blocks are far behind, and right where those would be whose indices had lost a bit.
#[test]
fn keys_and_values_far_behind_are_their_own() {
    let Some(device) = large_device("keys_and_values_far_behind_are_their_own") else { return };
    let (block_tokens, texts) = (16, texts(&[7, 33, 64, 120, 300]));
    let needed: u32 = texts.iter().map(|text| u32::try_from(text.len()).unwrap().div_ceil(block_tokens)).sum();
    for (heads, kv_heads, head_size, precision, tolerance) in [
        (8, 2, 128, Precision::Bf16, BF16),
        (14, 2, 64, Precision::Bf16, BF16),
        (4, 2, 16, Precision::Bf16, BF16),
        (8, 2, 64, Precision::F32, 1e-3),
    ] {
        let model = model(heads, kv_heads, head_size, false);
        let (shape, wanted) = (model.shape.clone(), wanted(&model, &texts));
        let limits = StepLimits { max_rows: MAX_ROWS, max_step_tokens: total(&texts) };
        let compute = CudaCompute::new(&device, model, precision, limits).unwrap();
        // A page of this size holds so few blocks that it is one of the card's smallest.
        let far = BORDERS[1] * u64::from(precision.bytes()) / Bytes::mib(2).0;
        let pages = u32::try_from(far).unwrap() + needed;
        let mut lab =
            Lab::large(Box::new(compute), &shape, Home::Gpu(precision), block_tokens, total(&texts), pages).unwrap();
        let all = lab.free_blocks();
        let elements = u64::from(block_tokens) * shape.kv_size() as u64;
        let mut chosen = Vec::new();
        for &id in all.iter().rev().take(needed.div_ceil(3) as usize) {
            assert!(u64::from(id.0) * elements > BORDERS[1], "{id} begins below the border");
            let short = BORDERS.map(|border| id.0 - u32::try_from(border / elements).unwrap());
            chosen.extend([id].into_iter().chain(short.map(tidekv_core::units::KernelId)));
        }
        assert!(chosen.iter().all(|id| all.contains(id)), "where a short index leads to, there are blocks");
        lab.lend(&chosen).unwrap();
        for (name, chunk) in [CHUNKS[0], CHUNKS[2], CHUNKS[3]] {
            let found = lab.logits(&texts, chunk).unwrap();
            compare(&format!("{heads} heads of {head_size}, {precision:?}, {name}"), 260, &found, &wanted, tolerance);
        }
    }
}

/// A model whose layers add nothing: a token's logits are the products of its embedding with all others, and its own is the largest.
fn mirror<M>(vocab: usize, hidden: usize, mut matrix: impl FnMut(usize, usize, f32) -> M) -> Model<M> {
    let shape = ModelShape {
        vocab,
        hidden,
        intermediate: 64,
        layers: 1,
        heads: 1,
        kv_heads: 1,
        head_size: 64,
        norm_epsilon: 1e-6,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        context_tokens: 8192,
    };
    let mut linear =
        |inputs: usize, outputs: usize, reach: f32| Linear { weight: matrix(inputs, outputs, reach), bias: None };
    let layer = Layer {
        attention_norm: vec![1.0; hidden],
        qkv: linear(hidden, shape.query_size() + 2 * shape.kv_size(), 0.05),
        query_norm: None,
        key_norm: None,
        output: linear(shape.query_size(), hidden, 0.0),
        feed_norm: vec![1.0; hidden],
        gate_up: linear(hidden, 2 * shape.intermediate, 0.05),
        down: linear(shape.intermediate, hidden, 0.0),
    };
    let head = linear(hidden, vocab, 1.0);
    let weights = Weights { embedding: Embedding::Tied, layers: vec![layer], norm: vec![1.0; hidden], head };
    Model { name: "mirror".to_owned(), shape, eos: Vec::new(), weights }
}

/// Number `index` of a seed, from -1 to 1, as bf16 has it: what `fill` makes there.
fn number(seed: u64, index: u64) -> f64 {
    let mixed = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let unit = ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let bits = unit.to_bits();
    // To the nearest, ties to even.
    f64::from(f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000))
}

/// Embeddings beyond 2^32 elements, and more than 2^32 logits in one step.
#[test]
fn embeddings_and_logits_far_behind_are_their_own() {
    let Some(device) = large_device("embeddings_and_logits_far_behind_are_their_own") else { return };
    let (vocab, hidden, rows) = ((1 << 22) + 300, 1024, 1030);
    let mut seeds = 0;
    let sketch = mirror(vocab, hidden, |rows, columns, reach| {
        seeds += 1;
        Draw { rows, columns, state: seeds, reach, loud: 0..u32::MAX, whisper: 1.0 }
    });
    let seed = sketch.weights.head.weight.state;
    let shape = sketch.shape.clone();
    let limits = StepLimits { max_rows: rows, max_step_tokens: rows };
    let compute = CudaCompute::made(&device, sketch, Precision::Bf16, limits).unwrap();
    let mut lab = Lab::with(Box::new(compute), &shape, Home::Gpu(Precision::Bf16), 16, rows).unwrap();
    let vocab = u32::try_from(vocab).unwrap();
    // Those behind both borders, and others all over the vocabulary.
    let tokens: Vec<u32> = (0..rows).map(|row| if row % 4 == 0 { vocab - 1 - row / 4 } else { row * 4072 }).collect();
    let looked_at = [0, 3, 511, 512, 600, 1023, 1024, 1029];
    let wanted: Vec<Wanted> = (0..rows).map(|token| Wanted { token, logits: looked_at.contains(&token) }).collect();
    let outputs = lab.step(&tokens, &wanted).unwrap();
    let wrong = (0..).zip(tokens.iter().zip(&outputs.best)).find(|(_, (token, best))| token != best);
    assert_eq!(wrong, None::<(u32, _)>, "the row whose token was another one's");
    // A few of the logits themselves, by hand.
    let embedding =
        |token: u32| (0..hidden as u64).map(move |at| number(seed, at * u64::from(vocab) + u64::from(token)));
    for (&row, logits) in looked_at.iter().zip(outputs.logits.rows()) {
        let own: Vec<f64> = embedding(tokens[row as usize]).collect();
        let size = (own.iter().map(|x| x * x).sum::<f64>() / hidden as f64).sqrt();
        for other in [0, 1 << 21, (1 << 22) - 1, (1 << 22) + 7, vocab - 1, tokens[row as usize]] {
            let product: f64 = own.iter().zip(embedding(other)).map(|(x, y)| x / size * y).sum();
            let found = f64::from(logits[other as usize]);
            assert!(
                (found - product).abs() < 0.5 + product.abs() / 200.0,
                "row {row}, token {other}: {found}, {product}"
            );
        }
    }
}

/// Embeddings that the host sends, beyond 2^31 elements.
#[test]
fn weights_sent_far_behind_are_their_own() {
    let Some(device) = large_device("weights_sent_far_behind_are_their_own") else { return };
    let (vocab, hidden) = ((1 << 21) + 64, 1024);
    // Tokens behind the border, those that a short index would take for them, and a few others; the rest of the vocabulary is nothing.
    let near = [0, 1, 5, 63];
    let tokens: Vec<u32> = near.iter().flat_map(|&token| [token, token + (1 << 21), token + (1 << 20)]).collect();
    let model = mirror(vocab, hidden, |rows, columns, reach| {
        let mut data = vec![0.0; rows * columns];
        if columns == vocab {
            for (row, numbers) in data.chunks_exact_mut(columns).enumerate() {
                let of_row = numbers_of(tokens.len(), u32::try_from(row).unwrap());
                tokens.iter().zip(of_row).for_each(|(&token, number)| numbers[token as usize] = number);
            }
        } else {
            data = numbers(rows * columns, 17, reach);
        }
        Matrix { rows, columns, data }
    });
    let shape = model.shape.clone();
    let count = u32::try_from(tokens.len()).unwrap();
    let limits = StepLimits { max_rows: MAX_ROWS, max_step_tokens: MAX_ROWS };
    let compute = CudaCompute::new(&device, model, Precision::Bf16, limits).unwrap();
    let mut lab = Lab::with(Box::new(compute), &shape, Home::Gpu(Precision::Bf16), 16, MAX_ROWS).unwrap();
    let wanted: Vec<Wanted> = (0..count).map(|token| Wanted { token, logits: false }).collect();
    assert_eq!(lab.step(&tokens, &wanted).unwrap().best, tokens);
}

fn numbers_of(count: usize, row: u32) -> Vec<f32> {
    numbers(count, 1000 + row, 1.0)
}

/// A step so large that its feed-forward part has more than 2^31 elements: the logits are those of the same text in small steps.
#[test]
fn large_steps_are_small_ones_put_together() {
    let Some(device) = large_device("large_steps_are_small_ones_put_together") else { return };
    const TOKENS: u32 = 33_000;
    let mut model = model(4, 1, 64, false);
    let (hidden, intermediate) = (model.shape.hidden, 32_768);
    assert!(u64::from(TOKENS) * 2 * intermediate as u64 > BORDERS[0]);
    model.shape.intermediate = intermediate;
    model.shape.context_tokens = 1 << 16;
    for (index, layer) in (0..).zip(&mut model.weights.layers) {
        let matrix = |rows: usize, columns: usize, seed| Linear {
            weight: Matrix { rows, columns, data: numbers(rows * columns, seed, (3.0 / rows as f32).sqrt()) },
            bias: Some(numbers(columns, seed + 1, 0.1)),
        };
        layer.gate_up = matrix(hidden, 2 * intermediate, 50 + 4 * index);
        layer.down = matrix(intermediate, hidden, 52 + 4 * index);
    }
    let text = [(0..TOKENS).map(|at| at * 7919 % 251).collect::<Vec<u32>>()];
    let logits = |step: usize| {
        let mut lab = on_gpu(&device, model.clone(), Precision::Bf16, 16, TOKENS + 64);
        lab.logits(&text, |_, _| step).unwrap()
    };
    let (small, large) = (logits(2048), logits(usize::MAX));
    compare("a step of 33,000 tokens", 260, &large, &small, BF16);
}
