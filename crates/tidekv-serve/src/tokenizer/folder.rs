//! Reading a model's folder: which file says what is the table of [`super`].

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use super::chat::JinjaTemplate;
use super::{ChatTemplate, SamplingDefaults, Tokenizer, TokenizerError, Words};

/// Variables that templates use, as `tokenizer_config.json` has them.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];

pub(super) fn read(folder: &Path) -> Result<Tokenizer, TokenizerError> {
    let path = folder.join("tokenizer.json");
    let bytes = fs::read(&path).map_err(|source| TokenizerError::Read { path: path.clone(), source })?;
    let malformed = |what: String| TokenizerError::Malformed { path: path.clone(), what };
    let mut json = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| malformed(error.to_string()))?;
    // What the tokenizer was last used with is kept in the file: prompts would be cut or filled up without a word.
    json.with_truncation(None).map_err(|error| malformed(error.to_string()))?;
    json.with_padding(None);
    let config = object(folder, "tokenizer_config.json")?;
    let generation = object(folder, "generation_config.json")?;
    let special_tokens: BTreeMap<_, _> =
        SPECIAL_TOKENS.iter().filter_map(|&name| Some((name.to_owned(), token_text(&config[name])?))).collect();

    let mut end_tokens = Vec::new();
    let own = special_tokens.get("eos_token").and_then(|text| json.token_to_id(text));
    for id in own.into_iter().chain(ids(folder, &generation["eos_token_id"])?) {
        if !end_tokens.contains(&id) {
            end_tokens.push(id);
        }
    }
    let chat = chat_template(folder, &config["chat_template"], special_tokens)?;
    let defaults = defaults(folder, &generation)?;
    Ok(Tokenizer { words: Words::Json(Box::new(json)), chat, end_tokens, defaults })
}

/// A JSON object that need not be there.
fn object(folder: &Path, name: &str) -> Result<Value, TokenizerError> {
    let Some(text) = text(folder, name)? else { return Ok(Value::Null) };
    let malformed = |what| TokenizerError::Malformed { path: folder.join(name), what };
    match serde_json::from_str(&text) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(malformed("it is not a JSON object".to_owned())),
        Err(error) => Err(malformed(error.to_string())),
    }
}

/// A file that need not be there.
fn text(folder: &Path, name: &str) -> Result<Option<String>, TokenizerError> {
    let path = folder.join(name);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TokenizerError::Read { path, source }),
    }
}

/// A token is written as its text, or as an object with it.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// `eos_token_id`: one id, several, or none.
fn ids(folder: &Path, value: &Value) -> Result<Vec<u32>, TokenizerError> {
    let one = |value: &Value| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| TokenizerError::Malformed {
            path: folder.join("generation_config.json"),
            what: format!("eos_token_id has {value}, which is not a token id"),
        })
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(several) => several.iter().map(one).collect(),
        single => Ok(vec![one(single)?]),
    }
}

fn chat_template(
    folder: &Path,
    in_config: &Value,
    special_tokens: BTreeMap<String, String>,
) -> Result<ChatTemplate, TokenizerError> {
    let (name, source) = match (text(folder, "chat_template.jinja")?, in_config) {
        (Some(source), _) => ("chat_template.jinja", Some(source)),
        (None, Value::Array(named)) => {
            let default = named.iter().find(|template| template["name"] == "default");
            ("tokenizer_config.json", default.and_then(|template| template["template"].as_str()).map(str::to_owned))
        }
        (None, value) => ("tokenizer_config.json", value.as_str().map(str::to_owned)),
    };
    let Some(source) = source else { return Ok(ChatTemplate::Plain) };
    let template = JinjaTemplate::new(source, special_tokens);
    template.map(|template| ChatTemplate::Jinja(Box::new(template))).map_err(|what| TokenizerError::Malformed {
        path: folder.join(name),
        what: format!("the chat template: {what}"),
    })
}

/// `temperature` and `top_p` where they make sense.
fn defaults(folder: &Path, generation: &Value) -> Result<SamplingDefaults, TokenizerError> {
    let mut defaults = SamplingDefaults::default();
    let fields = [
        ("temperature", &mut defaults.temperature, 0.0..=2.0),
        ("top_p", &mut defaults.top_p, f64::MIN_POSITIVE..=1.0),
    ];
    for (name, field, range) in fields {
        let value = &generation[name];
        if value.is_null() {
            continue;
        }
        let number = value.as_f64().filter(|number| range.contains(number));
        #[expect(clippy::cast_possible_truncation, reason = "a number of at most 2, to the precision it is used in")]
        let number = number.map(|number| number as f32);
        *field = number.ok_or_else(|| TokenizerError::Malformed {
            path: folder.join("generation_config.json"),
            what: format!("{name} is {value}, which is outside of what a model can be told"),
        })?;
    }
    Ok(defaults)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::tokenizer::{ChatMessage, ChatOptions};

    /// Byte-level BPE without merges: 256 letters, one special token.
    pub(in crate::tokenizer) fn write_tokenizer(folder: &Path) {
        let mut vocab = serde_json::Map::new();
        let mut next_odd = 256_u32;
        for byte in 0..=255_u8 {
            // The printable letters that byte-level tokenizers write for bytes.
            let is_plain = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let letter = if is_plain { char::from(byte) } else { char::from_u32(next_odd).unwrap() };
            next_odd += u32::from(!is_plain);
            vocab.insert(letter.to_string(), byte.into());
        }
        vocab.insert("<eos>".to_owned(), 256.into());
        vocab.insert("<turn>".to_owned(), 257.into());
        let special = |id: u32, content: &str| serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "added_tokens": [special(256, "<eos>"), special(257, "<turn>")],
            "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
        });
        fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    }

    fn folder_with(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        write_tokenizer(folder.path());
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn user(content: &str) -> [ChatMessage; 1] {
        [ChatMessage { role: "user".to_owned(), content: content.to_owned(), name: None }]
    }

    #[test]
    fn a_bare_tokenizer_takes_the_plain_form() {
        let folder = folder_with(&[]);
        let tokenizer = read(folder.path()).unwrap();
        let ids = tokenizer.encode_chat(&user("Zürich <eos>"), &ChatOptions::default()).unwrap();
        assert_eq!(tokenizer.decode(&ids), "user: Zürich \nassistant:", "the special token has no text");
        assert!(ids.contains(&256));
        assert!(tokenizer.end_tokens().is_empty());
        assert_eq!(tokenizer.defaults(), SamplingDefaults::default());
        assert_eq!(tokenizer.token(256).0, "<eos>");
    }

    /// As a tokenizer that was trained or exported with them leaves them in its file.
    #[test]
    fn prompts_are_neither_cut_nor_filled_up() {
        let folder = folder_with(&[]);
        let path = folder.path().join("tokenizer.json");
        let mut json: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        json["truncation"] =
            serde_json::json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = serde_json::json!({"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": null,
                                             "pad_id": 256, "pad_type_id": 0, "pad_token": "<eos>"});
        fs::write(&path, json.to_string()).unwrap();
        let tokenizer = read(folder.path()).unwrap();
        for (text, ids) in [("abcdef", &[97, 98, 99, 100, 101, 102][..]), ("a", &[97])] {
            assert_eq!(tokenizer.encode(text).unwrap(), ids);
        }
    }

    #[test]
    fn every_file_says_its_part() {
        let folder = folder_with(&[
            (
                "tokenizer_config.json",
                r#"{"eos_token": {"content": "<eos>"}, "chat_template": [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}]}"#,
            ),
            ("generation_config.json", r#"{"eos_token_id": [257, 256], "temperature": 0.5, "top_p": 0.9}"#),
        ]);
        let tokenizer = read(folder.path()).unwrap();
        assert_eq!(tokenizer.end_tokens(), [256, 257]);
        assert_eq!(tokenizer.defaults(), SamplingDefaults { temperature: 0.5, top_p: 0.9 });
        assert_eq!(tokenizer.encode_chat(&user("a"), &ChatOptions::default()).unwrap(), [97, 256]);

        fs::write(folder.path().join("chat_template.jinja"), "<turn>{{ messages[0].content }}").unwrap();
        let tokenizer = read(folder.path()).unwrap();
        assert_eq!(tokenizer.encode_chat(&user("a"), &ChatOptions::default()).unwrap(), [257, 97]);
    }

    #[test]
    fn what_is_missing_or_malformed_is_named() {
        let empty = tempfile::tempdir().unwrap();
        assert!(
            matches!(read(empty.path()), Err(TokenizerError::Read { path, .. }) if path.ends_with("tokenizer.json"))
        );
        for (name, text, part) in [
            ("tokenizer.json", "{}", "tokenizer.json"),
            ("tokenizer_config.json", "[]", "not a JSON object"),
            ("generation_config.json", "{", "generation_config.json"),
            ("generation_config.json", r#"{"eos_token_id": -1}"#, "eos_token_id has -1"),
            ("generation_config.json", r#"{"top_p": 2}"#, "top_p is 2"),
            ("chat_template.jinja", "{% if %}", "chat_template.jinja"),
        ] {
            let folder = folder_with(&[(name, text)]);
            let error = read(folder.path()).unwrap_err().to_string();
            assert!(error.contains(part), "{name} {text}: {error}");
        }
    }
}
