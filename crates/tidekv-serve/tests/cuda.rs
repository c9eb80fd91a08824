//! The GPU path against the processor's: the same logits, wherever the blocks are and however a text is cut. Needs a GPU.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a failed unwrap is a failed test; --nocapture shows how far"
)]

#[allow(dead_code, reason = "the engine's tests use the rest")]
#[path = "engine/support.rs"]
mod engine;
#[path = "support/lab.rs"]
mod lab;
#[path = "cuda/wide.rs"]
mod wide;

use std::io::Write;

use lab::{Home, Lab, MAX_ROWS};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidekv_core::units::Bytes;
use tidekv_mem::MemError;
use tidekv_serve::compute::cuda::{Device, StepLimits};
use tidekv_serve::compute::{ComputeError, CudaCompute, likeliest};
use tidekv_serve::config::{ComputeChoice, EngineConfig, KvBudget, KvMode, ModelSource, Precision, SyntheticSize};
use tidekv_serve::model::{Embedding, Layer, Linear, Matrix, Model, ModelShape, Rope, RopeScaling, Weights};

/// The first GPU, or says loudly that the test did not run. With `TIDEKV_REQUIRE_GPU` set, that is a failure.
fn device(test: &str) -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(
            error @ (ComputeError::Device(MemError::Unavailable { .. } | MemError::NoSuchDevice { count: 0, .. })
            | ComputeError::NoCublas { .. }),
        ) => {
            assert!(std::env::var_os("TIDEKV_REQUIRE_GPU").is_none(), "{test} needs a GPU: {error}");
            // Straight to the descriptor, in one write: the harness swallows what passing tests print.
            let _ = std::io::stderr().write_all(format!("SKIPPED: {test}: {error}\n").as_bytes());
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// Texts are shorter where a tool that checks every access of the device makes each step slow.
fn shortened(len: u32) -> u32 {
    if std::env::var_os("TIDEKV_SHORT_TESTS").is_some() { len.min(40) } else { len }
}

fn on_gpu(device: &Device, model: Model, precision: Precision, block_tokens: u32, tokens: u32) -> Lab {
    let shape = model.shape.clone();
    let limits = StepLimits { max_rows: MAX_ROWS, max_step_tokens: tokens.max(MAX_ROWS) };
    let compute = CudaCompute::new(device, model, precision, limits).unwrap();
    Lab::with(Box::new(compute), &shape, Home::Gpu(precision), block_tokens, tokens).unwrap()
}

fn tiny() -> Model {
    Model::load(&ModelSource::Synthetic { size: SyntheticSize::Tiny, seed: 3 }).unwrap()
}

/// Numbers that look random and are the same everywhere.
fn numbers(count: usize, seed: u32, reach: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    // As bf16 has them, so that both precisions compute the same model.
    (0..count).map(|_| f32::from_bits((next() * reach).to_bits() & 0xffff_0000)).collect()
}

/// Everything that a model can have: head norms, biases everywhere, one matrix for embedding and head if `is_tied`.
fn model(heads: usize, kv_heads: usize, head_size: usize, is_tied: bool) -> Model {
    let shape = ModelShape {
        vocab: 260,
        hidden: 128,
        intermediate: 192,
        layers: 2,
        heads,
        kv_heads,
        head_size,
        norm_epsilon: 1e-6,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        context_tokens: 8192,
    };
    let mut seed = 0;
    let mut next = |count: usize, reach: f32| {
        seed += 1;
        numbers(count, seed, reach)
    };
    let mut linear = |inputs: usize, outputs: usize, gain: f32, has_bias: bool| Linear {
        weight: Matrix {
            rows: inputs,
            columns: outputs,
            data: next(inputs * outputs, gain * (3.0 / inputs as f32).sqrt()),
        },
        bias: has_bias.then(|| next(outputs, 0.1)),
    };
    let (query, kv, hidden) = (shape.query_size(), shape.kv_size(), shape.hidden);
    let near_one = |size: usize, seed| numbers(size, seed, 0.25).into_iter().map(|x| 1.0 + x).collect::<Vec<f32>>();
    let layers = (0..shape.layers)
        .map(|_| Layer {
            attention_norm: near_one(hidden, 1000),
            qkv: linear(hidden, query + 2 * kv, 1.0, true),
            query_norm: is_tied.then(|| near_one(head_size, 1001)),
            key_norm: is_tied.then(|| near_one(head_size, 1002)),
            output: linear(query, hidden, 1.0, true),
            feed_norm: near_one(hidden, 1003),
            gate_up: linear(hidden, 2 * shape.intermediate, 1.0, true),
            down: linear(shape.intermediate, hidden, 1.0, true),
        })
        .collect();
    let head = linear(hidden, shape.vocab, 4.0, !is_tied);
    let embedding = match is_tied {
        true => Embedding::Tied,
        false => {
            let data = numbers(shape.vocab * hidden, 999, 1.0);
            Embedding::Own(Matrix { rows: shape.vocab, columns: hidden, data })
        }
    };
    let weights = Weights { embedding, layers, norm: near_one(hidden, 1004), head };
    Model { name: "test".to_owned(), shape, eos: Vec::new(), weights }
}

/// What the 8 bits of a bf16's mantissa may do to a logit, in the mean, after two layers.
const BF16: f32 = 0.03;

/// Texts of several lengths.
fn texts(lengths: &[u32]) -> Vec<Vec<u32>> {
    let token = |text: u32, at: u32| (text * 131 + at * at * 7 + at * 13) % 251;
    (0..).zip(lengths).map(|(text, &len)| (0..len).map(|at| token(text, at)).collect()).collect()
}

/// Tokens of a sequence in a step.
type Chunk = fn(usize, usize) -> usize;

/// Decode steps (and so graphs), odd pieces, whole prompts, and a mixture of decoding and prompts.
const CHUNKS: [(&str, Chunk); 4] = [
    ("one token", |_, _| 1),
    ("seventeen tokens", |_, _| 17),
    ("everything", |_, _| usize::MAX),
    ("a mixture", |sequence, step| (sequence * 5 + step * 3) % 23),
];

/// How far `found` is from `wanted`, in the mean of squares, in parts of the spread of the wanted.
fn distance(found: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(found.len(), wanted.len());
    assert!(found.iter().all(|logit| logit.is_finite()));
    // The silent tokens of synthetic models would make everything look near.
    let heard = || found.iter().zip(wanted).filter(|(_, wanted)| **wanted > -50.0);
    let count = heard().count() as f32;
    let spread = (heard().map(|(_, wanted)| wanted * wanted).sum::<f32>() / count).sqrt();
    (heard().map(|(found, wanted)| (found - wanted) * (found - wanted)).sum::<f32>() / count).sqrt() / spread
}

/// Compares every logit; and every choice, which may differ only where two logits are nearly equal.
fn compare(name: &str, vocab: usize, found: &[Vec<f32>], wanted: &[Vec<f32>], tolerance: f32) {
    let mut farthest = 0f32;
    for (text, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        for (at, (found, wanted)) in found.chunks_exact(vocab).zip(wanted.chunks_exact(vocab)).enumerate() {
            let far = distance(found, wanted);
            assert!(far < tolerance, "{name}: token {at} of text {text} is {far} away");
            farthest = farthest.max(far);
            let (chosen, best) = (likeliest(found) as usize, likeliest(wanted) as usize);
            let gap = wanted[best] - wanted[chosen];
            // Two logits may each be some deviations away.
            assert!(gap <= 40.0 * tolerance, "{name}: token {at} of text {text} is {chosen}, not {best}");
        }
    }
    println!("{name}: {farthest:.6} away at most");
}

/// The processor's answer for each text alone.
fn wanted(model: &Model, texts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let tokens = texts.iter().map(|text| u32::try_from(text.len()).unwrap()).max().unwrap();
    let mut lab = Lab::new(model.clone(), 2, 16, tokens.max(64)).unwrap();
    texts.iter().map(|text| lab.logits(std::slice::from_ref(text), |_, _| usize::MAX).unwrap().remove(0)).collect()
}

fn total(texts: &[Vec<u32>]) -> u32 {
    texts.iter().map(|text| u32::try_from(text.len()).unwrap() + 64).sum()
}

#[test]
fn a_machine_without_a_gpu_gets_one_sentence() {
    match Device::open(0) {
        Ok(device) => assert_eq!(device.number(), 0),
        Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
    }
}

/// Fifty texts of a synthetic model, teacher-forced, in float: the processor's logits to a thousandth.
#[test]
fn floats_equal_the_processor() {
    let Some(device) = device("floats_equal_the_processor") else { return };
    let model = tiny();
    let lengths: Vec<u32> = (0..50).map(|text| shortened(1 + text * 37 % 97)).collect();
    let texts = texts(&lengths);
    let wanted = wanted(&model, &texts);
    for block_tokens in [16, 4, 64] {
        let mut lab = on_gpu(&device, model.clone(), Precision::F32, block_tokens, total(&texts));
        for (name, chunk) in CHUNKS {
            let found = lab.logits(&texts, chunk).unwrap();
            compare(&format!("{name}, blocks of {block_tokens}"), 260, &found, &wanted, 1e-3);
        }
    }
}

/// Every kind of head, with and without tensor cores; bf16 within what 8 bits of mantissa allow.
#[test]
fn every_shape_of_heads_equals_the_processor() {
    let Some(device) = device("every_shape_of_heads_equals_the_processor") else { return };
    let texts = texts(&[1, 2, 15, 16, 17, 33, 64, shortened(130), shortened(257)]);
    for (heads, kv_heads, head_size, is_tied) in [
        (4, 2, 16, false),
        (4, 4, 64, true),
        (14, 2, 64, false),
        (8, 2, 128, true),
        (16, 1, 128, false),
        (32, 1, 64, true),
    ] {
        let model = model(heads, kv_heads, head_size, is_tied);
        let wanted = wanted(&model, &texts);
        for (precision, tolerance) in [(Precision::F32, 1e-3), (Precision::Bf16, BF16)] {
            let mut lab = on_gpu(&device, model.clone(), precision, 16, total(&texts));
            for (name, chunk) in CHUNKS {
                let found = lab.logits(&texts, chunk).unwrap();
                let name = format!("{heads} heads, {kv_heads} KV heads of {head_size}, {precision:?}, {name}");
                compare(&name, 260, &found, &wanted, tolerance);
            }
        }
    }
}

/// Decode steps alone: eager at first, then as graphs, in batches of every padding.
#[test]
fn graphs_equal_the_processor() {
    let Some(device) = device("graphs_equal_the_processor") else { return };
    let model = model(8, 2, 64, false);
    for rows in [1, 2, 3, 5, 9, 33, 64] {
        let texts = texts(&vec![shortened(50); rows]);
        let wanted = wanted(&model, &texts);
        for (precision, tolerance) in [(Precision::F32, 1e-3), (Precision::Bf16, BF16)] {
            let mut lab = on_gpu(&device, model.clone(), precision, 16, total(&texts));
            let found = lab.logits(&texts, |_, _| 1).unwrap();
            compare(&format!("{rows} rows, {precision:?}"), 260, &found, &wanted, tolerance);
        }
    }
}

/// Rows that are cut into many splits, and one that is not; keys far behind.
#[test]
fn long_texts_equal_the_processor() {
    let Some(device) = device("long_texts_equal_the_processor") else { return };
    let model = model(8, 2, 64, false);
    let long = shortened(1500);
    let texts = texts(&[long, 3, long / 2]);
    let wanted = wanted(&model, &texts);
    let mut lab = on_gpu(&device, model, Precision::Bf16, 16, total(&texts));
    // All but the end in large pieces, then token by token.
    let found = lab.logits(&texts, |_, step| if step < 3 { 470 } else { 1 }).unwrap();
    compare("long texts", 260, &found, &wanted, BF16);
}

/// The same steps give the same bits, wherever the blocks are: elastic and static memory cannot be told apart by the text.
#[test]
fn where_blocks_are_does_not_show() {
    let Some(device) = device("where_blocks_are_does_not_show") else { return };
    let texts = texts(&[7, 33, 64, shortened(120), shortened(300)]);
    let mut lab = on_gpu(&device, model(8, 2, 128, true), Precision::Bf16, 16, total(&texts));
    for (name, chunk) in CHUNKS {
        let first = lab.logits(&texts, chunk).unwrap();
        lab.reverse_blocks().unwrap();
        let second = lab.logits(&texts, chunk).unwrap();
        let bits = |logits: &[Vec<f32>]| logits.concat().iter().map(|logit| logit.to_bits()).collect::<Vec<u32>>();
        assert!(bits(&first) == bits(&second), "{name}");
    }
}

/// The device makes the numbers that the host would have sent.
#[test]
fn weights_made_on_the_device_are_the_hosts() {
    let Some(device) = device("weights_made_on_the_device_are_the_hosts") else { return };
    let texts = texts(&[40, 90]);
    let limits = StepLimits { max_rows: MAX_ROWS, max_step_tokens: 512 };
    for precision in [Precision::F32, Precision::Bf16] {
        let sketch = Model::sketch(SyntheticSize::Small, 7);
        let shape = sketch.shape.clone();
        let made = CudaCompute::made(&device, sketch, precision, limits).unwrap();
        let mut made = Lab::with(Box::new(made), &shape, Home::Gpu(precision), 16, 512).unwrap();
        let model = Model::load(&ModelSource::Synthetic { size: SyntheticSize::Small, seed: 7 }).unwrap();
        let mut sent = on_gpu(&device, model, precision, 16, 512);
        let [made, sent] = [&mut made, &mut sent].map(|lab| lab.logits(&texts, |_, _| 17).unwrap());
        assert!(made == sent, "{precision:?}");
    }
}

/// Weights that slept in host memory are the same ones.
#[test]
fn parked_weights_come_back_as_they_were() {
    let Some(device) = device("parked_weights_come_back_as_they_were") else { return };
    let texts = texts(&[40, 3]);
    let mut lab = on_gpu(&device, tiny(), Precision::Bf16, 16, 512);
    let before = lab.logits(&texts, |_, _| 1).unwrap();
    lab.compute().park().unwrap();
    let refused = lab.logits(&texts[1..], |_, _| 3).unwrap_err();
    assert!(refused.to_string().contains("wake the model first"), "{refused}");
    // The text that was refused has its row still: another lab's tables begin anew.
    let mut lab = on_gpu(&device, tiny(), Precision::Bf16, 16, 512);
    assert_eq!(lab.logits(&texts, |_, _| 1).unwrap(), before);
    lab.compute().park().unwrap();
    lab.compute().unpark().unwrap();
    assert_eq!(lab.logits(&texts, |_, _| 1).unwrap(), before);
}

/// A host without room for the weights: they stay where they are, and compute.
#[test]
fn weights_that_the_host_has_no_room_for_stay_on_the_device() {
    let Some(device) = device("weights_that_the_host_has_no_room_for_stay_on_the_device") else { return };
    let texts = texts(&[40, 3]);
    let mut lab = on_gpu(&device, tiny(), Precision::Bf16, 16, 512);
    let before = lab.logits(&texts, |_, _| 1).unwrap();
    let limit = getrlimit(Resource::As);
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    let current = Some(pages * rustix::param::page_size() as u64);
    setrlimit(Resource::As, Rlimit { current, maximum: limit.maximum }).unwrap();
    let refused = lab.compute().park();
    setrlimit(Resource::As, limit).unwrap();
    let refused = refused.unwrap_err();
    assert!(matches!(&refused, ComputeError::NoRoomToPark(MemError::OutOfMemory { .. })), "{refused}");
    assert_eq!(lab.logits(&texts, |_, _| 1).unwrap(), before);
    lab.compute().park().unwrap();
    lab.compute().unpark().unwrap();
    assert_eq!(lab.logits(&texts, |_, _| 1).unwrap(), before);
}

/// Two hundred requests through whole engines, with memory for a third of them: in floats the processor's tokens, preempted or not.
#[test]
fn an_engine_gives_the_processors_tokens() {
    if device("an_engine_gives_the_processors_tokens").is_none() {
        return;
    }
    const PAGES: u64 = 16;
    // A page of the card's granularity has four blocks, as on the processor.
    let budget = Bytes::mib(2 * PAGES);
    let count = if std::env::var_os("TIDEKV_SHORT_TESTS").is_some() { 20 } else { 200 };
    let requests: Vec<_> = (0..count)
        .map(|number| match number < 40 {
            true => engine::request(&engine::text(number, 1 + number % 15), 90),
            false => engine::request(&engine::text(number / 4 * 4, 1 + number * 37 % 40), 10 + number * 7 % 40),
        })
        .collect();
    let run = |lab: &engine::Lab| {
        let running: Vec<_> = requests.iter().map(|request| lab.engine.submit(request.clone()).unwrap()).collect();
        running.into_iter().map(engine::tokens).collect::<Vec<_>>()
    };
    let wanted = run(&engine::Lab::elastic(256));
    for kv in [KvMode::Elastic, KvMode::Static(budget)] {
        let compute = ComputeChoice::Cuda(Precision::F32);
        let lab = engine::Lab::new(|dir| EngineConfig {
            kv_budget: KvBudget::Given(budget),
            compute,
            ..engine::config(dir, kv, PAGES)
        });
        let found = run(&lab);
        for (number, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert_eq!(found, wanted, "{kv:?}: request {number}");
        }
        let stats = lab.engine.stats();
        assert!(count < 40 || stats.preemptions > 0, "{kv:?}: preemption was to be forced: {stats:?}");
        lab.assert_nothing_leaked();
        // Asleep it holds nothing of the pool, and awake it says the same.
        lab.engine.sleep(1).unwrap();
        lab.engine.wake_up().unwrap();
        assert_eq!(engine::tokens(lab.engine.submit(requests[1].clone()).unwrap()), wanted[1], "{kv:?}");
    }
}
