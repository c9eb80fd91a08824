//! How far two answers are the same, in tokens.

use std::time::Duration;

use serde_json::{Value, json};

use crate::load::BaseUrl;
use crate::servers::session::Session;
use crate::servers::texts::TextAnswer;
use crate::stats::to_f64;

const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// Share of A's tokens that come before the first difference, over all answers. The server splits texts into tokens
/// (`/tokenize`, which vLLM, SGLang and kvserve have); `None` where it does not.
pub(super) fn matching(session: &Session, url: &BaseUrl, a: &[TextAnswer], b: &[TextAnswer]) -> Option<f64> {
    let (mut same, mut all) = (0, 0);
    for (a, b) in a.iter().zip(b) {
        let (Ok(a), Ok(b)) = (&a.text, &b.text) else { continue };
        let tokens = split(session, url, a)?;
        all += tokens.len();
        same += if a == b { tokens.len() } else { common(&tokens, &split(session, url, b)?) };
    }
    (all > 0).then(|| to_f64(same as u64) / to_f64(all as u64))
}

fn split(session: &Session, url: &BaseUrl, text: &str) -> Option<Vec<u64>> {
    let body = json!({"prompt": text, "add_special_tokens": false}).to_string().into_bytes();
    let answer: Value = serde_json::from_str(&session.post(url, "/tokenize", body, ASK_TIMEOUT)?).ok()?;
    answer["tokens"].as_array()?.iter().map(Value::as_u64).collect()
}

/// How many tokens two lists begin alike with.
fn common(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_before_the_first_difference() {
        assert_eq!(common(&[1, 2, 3], &[1, 2, 4]), 2);
        assert_eq!(common(&[1, 2], &[1, 2, 4]), 2);
        assert_eq!(common(&[], &[1]), 0);
        assert_eq!(common(&[9, 2], &[1, 2]), 0, "what is alike behind a difference is chance");
    }
}
