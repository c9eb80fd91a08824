//! Which model is meant: a synthetic one, a folder, or a Hugging Face id that was downloaded before.
//!
//! ```text
//!   $HF_HUB_CACHE | $HF_HOME/hub | $XDG_CACHE_HOME/huggingface/hub | ~/.cache/huggingface/hub
//!     models--Qwen--Qwen3-0.6B/
//!       refs/main                  the commit that `hf download` got last
//!       snapshots/<commit>/        the folder we serve
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use tidekv_serve::config::ModelSource;

/// A model that is not there.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FindError {
    /// Neither a folder nor in the cache.
    #[error(
        "{name:?} is neither a folder nor in the Hugging Face cache {}: `hf download {name}` downloads it, and `kvserve synthetic:tiny` needs no download",
        cache.display()
    )]
    NotDownloaded { name: String, cache: PathBuf },
    /// Something that cannot be an id either.
    #[error(
        "there is no folder {name:?}: give a folder with config.json, a Hugging Face id such as Qwen/Qwen3-0.6B, or synthetic:tiny"
    )]
    NoFolder { name: String },
    /// A file.
    #[error("{name:?} is not a folder: give the folder that has config.json, *.safetensors and tokenizer.json")]
    NotAFolder { name: String },
}

/// The model of this name. `variable` is the environment.
pub(super) fn find(name: &str, variable: impl Fn(&str) -> Option<String>) -> anyhow::Result<ModelSource> {
    let source = name.parse()?;
    let ModelSource::Folder(path) = &source else { return Ok(source) };
    if path.is_dir() {
        return Ok(source);
    }
    if path.exists() {
        return Err(FindError::NotAFolder { name: name.to_owned() }.into());
    }
    if !is_id(name) {
        return Err(FindError::NoFolder { name: name.to_owned() }.into());
    }
    let cache = cache(variable);
    match snapshot(&cache, name) {
        Some(folder) => Ok(ModelSource::Folder(folder)),
        None => Err(FindError::NotDownloaded { name: name.to_owned(), cache }.into()),
    }
}

/// `owner/name`, or `name` alone, of the letters that the hub allows.
fn is_id(name: &str) -> bool {
    let is_word = |word: &str| {
        let mut letters = word.chars();
        letters.next().is_some_and(|first| first.is_ascii_alphanumeric() || first == '_')
            && letters.all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.'))
    };
    name.split('/').count() <= 2 && name.split('/').all(is_word)
}

/// Where `hf download` puts models.
fn cache(variable: impl Fn(&str) -> Option<String>) -> PathBuf {
    let get = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let of_user = || get("XDG_CACHE_HOME").unwrap_or_else(|| get("HOME").unwrap_or_default().join(".cache"));
    get("HF_HUB_CACHE").unwrap_or_else(|| get("HF_HOME").unwrap_or_else(|| of_user().join("huggingface")).join("hub"))
}

/// The folder of a model's `main`, or of its only snapshot.
fn snapshot(cache: &Path, name: &str) -> Option<PathBuf> {
    let model = cache.join(format!("models--{}", name.replace('/', "--")));
    let snapshots = model.join("snapshots");
    if let Ok(commit) = fs::read_to_string(model.join("refs/main")) {
        let folder = snapshots.join(commit.trim());
        if folder.is_dir() {
            return Some(folder);
        }
    }
    let mut folders = fs::read_dir(snapshots).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    folders.next().filter(|only| only.is_dir() && folders.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, home: &Path) -> Result<ModelSource, String> {
        let home = home.to_str().unwrap().to_owned();
        find(name, |variable| (variable == "HF_HOME").then(|| home.clone())).map_err(|error| error.to_string())
    }

    #[test]
    fn an_id_is_found_where_it_was_downloaded() {
        let home = tempfile::tempdir().unwrap();
        let model = home.path().join("hub/models--Qwen--Qwen3-0.6B");
        let missing = found("Qwen/Qwen3-0.6B", home.path()).unwrap_err();
        assert!(missing.contains("`hf download Qwen/Qwen3-0.6B`"), "{missing}");
        assert!(missing.contains(home.path().join("hub").to_str().unwrap()), "{missing}");

        fs::create_dir_all(model.join("snapshots/aaa")).unwrap();
        let folder = |name: &str| Ok(ModelSource::Folder(model.join("snapshots").join(name)));
        assert_eq!(found("Qwen/Qwen3-0.6B", home.path()), folder("aaa"), "the only one");
        fs::create_dir_all(model.join("snapshots/bbb")).unwrap();
        assert!(found("Qwen/Qwen3-0.6B", home.path()).is_err(), "which of the two?");
        fs::create_dir_all(model.join("refs")).unwrap();
        fs::write(model.join("refs/main"), "bbb\n").unwrap();
        assert_eq!(found("Qwen/Qwen3-0.6B", home.path()), folder("bbb"));
    }

    #[test]
    fn folders_files_and_nonsense() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().to_str().unwrap();
        assert_eq!(found(path, home.path()), Ok(ModelSource::Folder(home.path().into())));
        let file = home.path().join("model.gguf");
        fs::write(&file, "").unwrap();
        assert!(found(file.to_str().unwrap(), home.path()).unwrap_err().contains("is not a folder"));
        for nonsense in ["./missing", "/missing/model", "a/b/c", "../x", "has space"] {
            assert!(found(nonsense, home.path()).unwrap_err().contains("there is no folder"), "{nonsense}");
        }
        assert!(found("synthetic:huge", home.path()).unwrap_err().contains("synthetic:tiny"));
        assert!(matches!(found("synthetic:tiny:3", home.path()), Ok(ModelSource::Synthetic { seed: 3, .. })));
    }

    #[test]
    fn the_cache_is_where_its_variables_say() {
        let with =
            |set: &[(&str, &str)]| cache(|name| set.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_owned()));
        assert_eq!(with(&[("HOME", "/h")]), Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(with(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(with(&[("HF_HOME", "/f"), ("XDG_CACHE_HOME", "/x")]), Path::new("/f/hub"));
        assert_eq!(with(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/f")]), Path::new("/c"));
    }
}
