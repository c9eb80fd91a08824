//! Model folders that are incomplete, damaged, or of something else: one sentence that names the file and the tensor.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};
use tidekv_serve::config::ModelSource;
use tidekv_serve::model::{Embedding, Model, ModelError};

const CONFIG: &str = r#"{
    "model_type": "qwen3", "vocab_size": 6, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "max_position_embeddings": 64,
    "eos_token_id": 5
}"#;

/// Every tensor of that model, its shape, and which file of two it is in.
const TENSORS: [(&str, &[usize], u32); 14] = [
    ("model.embed_tokens.weight", &[6, 4], 1),
    ("model.layers.0.input_layernorm.weight", &[4], 1),
    ("model.layers.0.self_attn.q_proj.weight", &[4, 4], 1),
    ("model.layers.0.self_attn.k_proj.weight", &[2, 4], 1),
    ("model.layers.0.self_attn.v_proj.weight", &[2, 4], 1),
    ("model.layers.0.self_attn.q_norm.weight", &[2], 1),
    ("model.layers.0.self_attn.k_norm.weight", &[2], 1),
    ("model.layers.0.self_attn.o_proj.weight", &[4, 4], 2),
    ("model.layers.0.post_attention_layernorm.weight", &[4], 2),
    ("model.layers.0.mlp.gate_proj.weight", &[8, 4], 2),
    ("model.layers.0.mlp.up_proj.weight", &[8, 4], 2),
    ("model.layers.0.mlp.down_proj.weight", &[4, 8], 2),
    ("model.norm.weight", &[4], 2),
    ("lm_head.weight", &[6, 4], 2),
];

/// Writes the folder; `change` may turn a tensor into another, or into none.
fn write(folder: &Path, change: impl Fn(&str) -> Option<(Vec<usize>, Dtype)>) {
    fs::write(folder.join("config.json"), CONFIG).unwrap();
    for file in [1, 2] {
        let mut tensors: HashMap<&str, (Vec<usize>, Dtype, Vec<u8>)> = HashMap::new();
        for (name, _, _) in TENSORS.iter().filter(|tensor| tensor.2 == file) {
            let Some((shape, dtype)) = change(name) else { continue };
            let elements: usize = shape.iter().product();
            // Element i is i: what is turned can be told from what is not.
            let bytes = match dtype {
                Dtype::F32 => (0..elements).flat_map(|i| (i as f32).to_le_bytes()).collect(),
                Dtype::I64 => (0..elements).flat_map(|i| (i as i64).to_le_bytes()).collect(),
                other => panic!("{other:?} is not written here"),
            };
            tensors.insert(name, (shape, dtype, bytes));
        }
        let view = |(name, (shape, dtype, bytes)): (&&str, &'_ (Vec<usize>, Dtype, Vec<u8>))| {
            ((*name).to_owned(), (shape.clone(), *dtype, bytes.clone()))
        };
        let owned: Vec<_> = tensors.iter().map(view).collect();
        let views = owned.iter().map(|(name, (shape, dtype, bytes))| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        serialize_to_file(views, None, &folder.join(format!("model-{file}.safetensors"))).unwrap();
    }
}

fn shape_of(name: &str) -> Vec<usize> {
    TENSORS.iter().find(|tensor| tensor.0 == name).unwrap().1.to_vec()
}

fn as_it_should_be(name: &str) -> Option<(Vec<usize>, Dtype)> {
    Some((shape_of(name), Dtype::F32))
}

fn load(folder: &Path) -> Result<Model, ModelError> {
    Model::load(&ModelSource::Folder(folder.to_owned()))
}

#[test]
fn a_whole_folder_is_a_model() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), as_it_should_be);
    let model = load(folder.path()).unwrap();
    assert_eq!((model.eos.as_slice(), model.shape.layers), (&[5][..], 1));
    let layer = &model.weights.layers[0];
    // q, k and v side by side, each turned: row 1 is the second input of every output.
    assert_eq!(layer.qkv.weight.data[8..16], [1.0, 5.0, 9.0, 13.0, 1.0, 5.0, 1.0, 5.0]);
    assert!(matches!(&model.weights.embedding, Embedding::Own(table) if table.data[4] == 4.0));
    assert_eq!(layer.key_norm, Some(vec![0.0, 1.0]));
    // The end of a text is what generation_config.json says, where there is one.
    fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [2, 3]}"#).unwrap();
    assert_eq!(load(folder.path()).unwrap().eos, [2, 3]);
}

#[test]
fn every_tensor_that_is_missing_or_misshapen_is_named() {
    for (broken, shape, file) in TENSORS {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), |name| as_it_should_be(name).filter(|_| name != broken));
        match load(folder.path()).unwrap_err() {
            ModelError::MissingTensor { path, tensor } => {
                assert_eq!((path.as_path(), &*tensor), (folder.path(), broken))
            }
            other => panic!("{other}"),
        }
        let wrong: Vec<usize> = shape.iter().map(|size| size + 1).collect();
        write(folder.path(), |name| Some((if name == broken { wrong.clone() } else { shape_of(name) }, Dtype::F32)));
        match load(folder.path()).unwrap_err() {
            ModelError::Misshapen { path, tensor, found, wanted } => {
                assert_eq!((tensor.as_str(), found, wanted.as_slice()), (broken, wrong, shape));
                assert_eq!(path, folder.path().join(format!("model-{file}.safetensors")));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn what_is_no_folder_of_weights_is_said_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    assert!(matches!(load(path), Err(ModelError::Read { path, .. }) if path.ends_with("config.json")));
    fs::write(path.join("config.json"), "not json").unwrap();
    assert!(matches!(load(path), Err(ModelError::Json { .. })));
    fs::write(path.join("config.json"), CONFIG).unwrap();
    assert!(matches!(load(path), Err(ModelError::NoWeights { .. })));
    write(path, |name| {
        let dtype = if name == "model.norm.weight" { Dtype::I64 } else { Dtype::F32 };
        Some((shape_of(name), dtype))
    });
    let error = load(path).unwrap_err();
    assert!(
        matches!(&error, ModelError::Precision { tensor, found, .. } if tensor == "model.norm.weight" && found == "I64")
    );
}

#[test]
fn a_file_cut_off_anywhere_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), as_it_should_be);
    let path = folder.path().join("model-1.safetensors");
    let whole = fs::read(&path).unwrap();
    for len in (0..whole.len()).step_by(37).chain([whole.len() - 1]) {
        fs::write(&path, &whole[..len]).unwrap();
        let error = load(folder.path()).unwrap_err();
        assert!(matches!(&error, ModelError::Damaged { path: named, .. } if *named == path), "{len}: {error}");
    }
    let mut huge = whole;
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&path, huge).unwrap();
    assert!(matches!(load(folder.path()), Err(ModelError::Damaged { .. })));
}
