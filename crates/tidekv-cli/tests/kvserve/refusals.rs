//! What `kvserve` refuses before it serves anything: exit code 2 and one sentence.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::process::kvserve;

/// The one sentence.
fn error(dir: &Path, args: &[&str]) -> String {
    // Where there is a GPU, it is not for this.
    let output = kvserve(dir, &["--port", "0"]).args(args).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "");
    assert!(text.starts_with("error: ") && text.lines().count() == 1, "{text}");
    text
}

#[test]
fn every_refusal_is_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    for (args, part) in [
        (&["Qwen/Qwen3-0.6B"][..], "`hf download Qwen/Qwen3-0.6B`"),
        (&["./no-such-folder"], "there is no folder"),
        (&["synthetic:huge"], "synthetic:tiny"),
        (&["one", "two"], "one model at a time"),
        (&["--kv", "rubber"], "elastic, static or static:SIZE"),
        (&["--kv", "static:2G", "--kv-budget", "1G"], "more than the KV budget"),
        (&["--backend", "cuda"], "--backend cpu needs none"),
        (&["synthetic:llama-8b", "--backend", "cpu"], "is made on a GPU"),
        (&["--max-model-len", "100000000"], "--max-model-len"),
        (&["--host", "no such host"], "no such host"),
        (
            &["--host", "0.0.0.0"],
            "a key is needed, because others can reach it there: give --api-key-file FILE, set VLLM_API_KEY",
        ),
        (&["--api-key", "hunter2"], "--api-key shows the key to all users of this machine"),
        (&["--allowed-hosts", "http://gpu7"], "is not a host name"),
        (&["--allowed-origins", "[\"*\"]"], "name the sites"),
        (&["--allowed-origins", "[\"https://a.example\""], "is not a JSON list"),
    ] {
        let text = error(dir.path(), args);
        assert!(text.contains(part) && !text.contains("hunter2"), "{args:?}: {text}");
    }
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("kvcached_kvserve")), "{left:?}");
}

/// A key that others may know is none, and a pipe that nobody writes to keeps nobody waiting.
#[test]
fn a_key_file_is_for_one_user_and_has_a_key_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    for (text, mode, part) in [
        ("hunter2", 0o644, "other users may read or change it (mode 644): chmod 600 it"),
        ("hunter2", 0o620, "(mode 620)"),
        ("", 0o600, "there is no key in it"),
        ("hunter2\nhunter2\n", 0o600, "there is no key in it"),
    ] {
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        let said = error(dir.path(), &["--api-key-file", file.to_str().unwrap()]);
        assert!(said.contains(part) && said.contains("--api-key-file") && !said.contains("hunter2"), "{said}");
    }
    fs::remove_file(&file).unwrap();
    assert!(error(dir.path(), &["--api-key-file", file.to_str().unwrap()]).contains("No such file"));
    rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    assert!(error(dir.path(), &["--api-key-file", file.to_str().unwrap()]).contains("not a regular file"));
}

#[test]
fn an_incomplete_folder_names_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    let path = model.to_str().unwrap();
    assert!(error(dir.path(), &[path]).contains("tokenizer.json"));
    let tokenizer = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}}"#;
    fs::write(model.join("tokenizer.json"), tokenizer).unwrap();
    assert!(error(dir.path(), &[path]).contains("config.json"));
    fs::write(model.join("config.json"), "{}").unwrap();
    assert!(error(dir.path(), &[path]).contains("config.json"));
    fs::write(model.join("chat_template.jinja"), "{% if %}").unwrap();
    assert!(error(dir.path(), &[path]).contains("chat_template.jinja"));
}
