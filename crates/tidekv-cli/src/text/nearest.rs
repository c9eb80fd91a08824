//! The name that was meant, when the one that was written does not exist.

/// The most similar of `names`, if one is similar enough to be worth saying: at most a third of its letters differ, or
/// it begins with what was written. Case does not count.
pub fn nearest<'a>(written: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let written = written.to_lowercase();
    let distance = |name: &str| {
        let name = name.to_lowercase();
        if !written.is_empty() && name.starts_with(&written) { 0 } else { strsim::damerau_levenshtein(&written, &name) }
    };
    let candidates = names.into_iter().map(|name| (distance(name), name));
    let close = candidates.filter(|&(distance, name)| distance <= name.chars().count() / 3);
    close.min_by_key(|&(distance, _)| distance).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 3] = ["kvcached_vLLM_4711", "kvcached_SGLang_12", "VLLM"];

    #[test]
    fn typing_errors_case_and_beginnings() {
        assert_eq!(nearest("vllm", NAMES), Some("VLLM"));
        assert_eq!(nearest("VLML", NAMES), Some("VLLM"));
        assert_eq!(nearest("kvcached_vLLM_4712", NAMES), Some("kvcached_vLLM_4711"));
        assert_eq!(nearest("kvcached_sg", NAMES), Some("kvcached_SGLang_12"));
    }

    #[test]
    fn nothing_is_suggested_that_has_nothing_in_common() {
        assert_eq!(nearest("llama", NAMES), None);
        assert_eq!(nearest("", NAMES), None);
        assert_eq!(nearest("x", []), None);
    }
}
