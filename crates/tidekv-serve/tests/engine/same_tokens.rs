//! The same tokens whatever happens around a request: memory that comes and goes, company, preemption, cached prefixes.

use tidekv_core::units::Bytes;
use tidekv_serve::config::{EngineConfig, KvMode};
use tidekv_serve::handle::{GenerateRequest, Sampling};

use crate::support::{Lab, PAGE, config, request, text, tokens};

/// 200 prompts of 1 to 88 tokens, some of which begin alike. The first are short and their answers long: all of them find
/// a place, and then they grow.
fn requests() -> Vec<GenerateRequest> {
    let one = |number: u32| {
        if number < 40 {
            return request(&text(number, 1 + number % 15), 90);
        }
        let mut prompt = if number.is_multiple_of(4) { text(7, 48) } else { Vec::new() };
        prompt.extend(text(number, 1 + number * 37 % 40));
        request(&prompt, 10 + number * 7 % 40)
    };
    (0..200).map(one).collect()
}

fn all_at_once(lab: &Lab, requests: &[GenerateRequest]) -> Vec<Vec<u32>> {
    let running: Vec<_> = requests.iter().map(|request| lab.engine.submit(request.clone()).unwrap()).collect();
    running.into_iter().map(tokens).collect()
}

/// 16 pages of 4 blocks: 64 blocks, where the first 32 rows come to want 200.
const PAGES: u64 = 16;

#[test]
fn elastic_static_and_one_at_a_time_give_the_same_tokens() {
    let requests = requests();
    let alone = Lab::new(|dir| EngineConfig { max_cached_tokens: Some(0), ..config(dir, KvMode::Elastic, PAGES) });
    let wanted: Vec<_> = requests.iter().map(|request| tokens(alone.engine.submit(request.clone()).unwrap())).collect();
    assert_eq!(alone.engine.stats().preemptions, 0);
    assert!(wanted.iter().zip(&requests).all(|(tokens, request)| tokens.len() == request.max_tokens as usize));

    let fixed = KvMode::Static(Bytes(PAGES * PAGE.0));
    for (name, kv, cached) in [
        ("elastic", KvMode::Elastic, None),
        ("elastic without cached prefixes", KvMode::Elastic, Some(0)),
        ("static", fixed, Some(1000)),
    ] {
        let lab = Lab::new(|dir| EngineConfig { max_cached_tokens: cached, ..config(dir, kv, PAGES) });
        let got = all_at_once(&lab, &requests);
        for (number, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
            assert_eq!(got, wanted, "{name}: request {number}");
        }
        let stats = lab.engine.stats();
        assert!(stats.preemptions > 0, "{name}: preemption was to be forced: {stats:?}");
        assert_eq!(stats.prefix_hit_tokens > 0, cached != Some(0), "{name}: {stats:?}");
        lab.assert_nothing_leaked();
    }
}

#[test]
fn a_seed_draws_the_same_tokens_in_any_company() {
    let drawn = |number: u32, seed| GenerateRequest {
        sampling: Sampling { temperature: 0.9, top_p: 0.95, seed: Some(seed) },
        ..request(&text(number, 20), 24)
    };
    let lab = Lab::elastic(64);
    let alone = tokens(lab.engine.submit(drawn(1, 5)).unwrap());
    let others = (2..20).map(|number| drawn(number, u64::from(number)));
    let crowd: Vec<_> = [drawn(1, 5), drawn(1, 6)].into_iter().chain(others).collect();
    let crowd = all_at_once(&lab, &crowd);
    assert_eq!(crowd[0], alone);
    assert_ne!(crowd[1], alone, "another seed draws other tokens");
}

#[test]
fn a_prompt_that_is_known_is_not_computed_again() {
    let lab = Lab::elastic(64);
    let prompt = text(3, 100);
    let first = crate::support::finish(lab.submit(&prompt, 8)).unwrap();
    let second = crate::support::finish(lab.submit(&prompt, 8)).unwrap();
    assert_eq!(first.0, second.0);
    assert_eq!((first.2.cached_tokens, second.2.cached_tokens), (0, 96), "six full blocks of sixteen");
    // Exactly full blocks: the last token is computed all the same.
    let full = crate::support::finish(lab.submit(&prompt[..96], 1)).unwrap();
    assert_eq!(full.2.cached_tokens, 80);
    // What was made is known too: the text goes on from the answer.
    let longer: Vec<u32> = prompt.iter().chain(&first.0).copied().chain(text(9, 9)).collect();
    let usage = crate::support::finish(lab.submit(&longer, 1)).unwrap().2;
    assert_eq!(usage.cached_tokens, 96, "107 tokens were computed, and six full blocks of them");
}

#[test]
fn a_prompt_is_known_only_to_requests_with_its_salt() {
    let lab = Lab::elastic(64);
    let ask = |salt: Option<&str>| {
        let salted = GenerateRequest { cache_salt: salt.map(str::to_owned), ..request(&text(3, 100), 8) };
        let (tokens, _, usage) = crate::support::finish(lab.engine.submit(salted).unwrap()).unwrap();
        (tokens, usage.cached_tokens)
    };
    let (plain, _) = ask(None);
    for salt in ["one", "two"] {
        assert_eq!(ask(Some(salt)), (plain.clone(), 0), "{salt} for the first time");
        assert_eq!(ask(Some(salt)), (plain.clone(), 96), "{salt} again");
    }
    assert_eq!(ask(None), (plain.clone(), 96));
}
