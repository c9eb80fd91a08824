//! What can never work is refused when it is submitted, by name; starting what cannot work fails in one sentence.

use std::error::Error as _;

use tidekv_core::units::Bytes;
use tidekv_serve::config::{ComputeChoice, EngineConfig, KvBudget, KvMode, ModelSource, Precision, SyntheticSize};
use tidekv_serve::engine::{StartError, start};
use tidekv_serve::handle::{GenerateRequest, Sampling, SubmitError};

use crate::support::{BLOCK, Lab, PAGE, config, request, text};

#[test]
fn requests_that_can_never_be_served() {
    let lab = Lab::new(|dir| EngineConfig { context_tokens: Some(600), ..config(dir, KvMode::Elastic, 4) });
    let refused = |request: GenerateRequest| lab.engine.submit(request).map(drop).unwrap_err();
    assert_eq!(refused(request(&[], 1)), SubmitError::EmptyPrompt);
    assert_eq!(refused(request(&[5, 260], 1)), SubmitError::UnknownToken { id: 260, vocab: 260 });
    let too_long = SubmitError::PromptTooLong { prompt_tokens: 600, context_tokens: 600 };
    assert_eq!(refused(request(&text(1, 600), 1)), too_long);
    let too_many = SubmitError::TooManyTokens { prompt_tokens: 500, max_tokens: 101, context_tokens: 600 };
    assert_eq!(refused(request(&text(1, 500), 101)), too_many);
    let capacity_tokens = 16 * BLOCK;
    let never = SubmitError::NeverFits { needed_tokens: capacity_tokens + 1, capacity_tokens };
    assert_eq!(refused(request(&text(1, 256), 2)), never);
    for (field, sampling) in [
        ("temperature", Sampling { temperature: -1.0, ..Sampling::GREEDY }),
        ("temperature", Sampling { temperature: f32::NAN, ..Sampling::GREEDY }),
        ("top_p", Sampling { top_p: 0.0, ..Sampling::GREEDY }),
        ("top_p", Sampling { top_p: 1.5, ..Sampling::GREEDY }),
    ] {
        let error = refused(GenerateRequest { sampling, ..request(&[1], 1) });
        assert!(matches!(error, SubmitError::OutOfRange { field: named, .. } if named == field), "{error}");
    }
    assert!(matches!(refused(request(&[1], 0)), SubmitError::OutOfRange { field: "max_tokens", .. }));
    lab.assert_nothing_leaked();
    // The largest that fits is served.
    let largest = lab.submit(&text(1, 256), 1);
    assert_eq!(crate::support::tokens(largest).len(), 1);
}

#[test]
fn a_queue_has_an_end() {
    let lab = Lab::new(|dir| EngineConfig { max_batch_rows: 1, max_waiting: 2, ..config(dir, KvMode::Elastic, 64) });
    let _running = lab.submit(&text(1, 20), 800);
    lab.wait_for("a running request", |stats| stats.running == 1 && stats.waiting == 0);
    let _waiting = [lab.submit(&text(2, 2), 1), lab.submit(&text(3, 2), 1)];
    let full = lab.engine.submit(request(&[1], 1)).map(drop).unwrap_err();
    assert_eq!(full, SubmitError::QueueFull { waiting: 2, limit: 2 });
}

#[test]
fn engines_that_cannot_start() {
    let dir = tempfile::tempdir().unwrap();
    let sentence = |config: EngineConfig| start(config).map(drop).unwrap_err();
    let good = || config(&dir, KvMode::Elastic, 4);
    // Where there is a GPU it starts.
    let on_gpu = EngineConfig { compute: ComputeChoice::Cuda(Precision::Bf16), ..good() };
    if let Err(error) = start(on_gpu).map(drop) {
        assert!(matches!(error, StartError::NoCuda(_)), "{error}");
        let reason = error.source().expect("what is missing").to_string();
        assert!(reason.contains("install the") && !reason.contains('\n'), "{reason}");
    }
    let large = ModelSource::Synthetic { size: SyntheticSize::Llama8b, seed: 0 };
    let large = sentence(EngineConfig { model: large, ..good() });
    assert!(large.to_string().contains("is made on a GPU"), "{large}");
    let context = sentence(EngineConfig { context_tokens: Some(1 << 20), ..good() });
    assert!(matches!(context, StartError::Context { asked: 1_048_576, most: 32_768 }), "{context}");
    let large = sentence(EngineConfig { kv: KvMode::Static(Bytes(5 * PAGE.0)).into(), ..good() });
    assert!(matches!(large, StartError::OverBudget { .. }), "{large}");
    let narrow = sentence(EngineConfig { max_step_tokens: 8, ..good() });
    assert!(matches!(narrow, StartError::Batch(_)), "{narrow}");
    let small = sentence(EngineConfig { kv_budget: KvBudget::Given(Bytes(1)), ..good() });
    assert!(matches!(small, StartError::Kv(_)), "{small}");
    let missing = dir.path().join("no-such-model");
    let absent = sentence(EngineConfig { model: ModelSource::Folder(missing.clone()), ..good() });
    assert!(absent.to_string().contains(&*missing.join("config.json").to_string_lossy()), "{absent}");
    let left: Vec<_> = dir.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("engine-test")), "{left:?}");
}
