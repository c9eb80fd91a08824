//! The tensors of a folder, in one `*.safetensors` or in several.
//!
//! ```text
//!   file   [ 8 bytes: header length | header: JSON, name -> type, shape, place | bytes of all tensors ]
//! ```
//!
//! Only the headers are read at first; each tensor is then read from its place, converted, and turned while it is
//! written, so that loading needs the weights once in memory and a piece of a file on top.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::error::ModelError;

/// A header of more bytes is a damaged file, as the format's own readers have it.
const MAX_HEADER: u64 = 100_000_000;
/// Read at a time.
const PIECE: usize = 4 << 20;

/// All tensors of a folder.
#[derive(Debug)]
pub(super) struct Tensors {
    folder: PathBuf,
    files: Vec<TensorFile>,
    /// Name to the file that has it.
    places: HashMap<String, usize>,
}

#[derive(Debug)]
struct TensorFile {
    path: PathBuf,
    file: File,
    data_start: u64,
    metadata: Metadata,
}

impl Tensors {
    /// Opens every `*.safetensors` of a folder. An index file is not needed: the headers say what is where.
    pub(super) fn open(folder: &Path) -> Result<Self, ModelError> {
        let unreadable = |source| ModelError::Read { path: folder.to_owned(), source };
        let mut paths = Vec::new();
        for entry in folder.read_dir().map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                paths.push(path);
            }
        }
        if paths.is_empty() {
            return Err(ModelError::NoWeights { path: folder.to_owned() });
        }
        paths.sort_unstable();
        let files = paths.into_iter().map(TensorFile::open).collect::<Result<Vec<_>, _>>()?;
        let names = |(index, file): (usize, &TensorFile)| {
            file.metadata.tensors().into_keys().map(|name| (name, index)).collect::<Vec<_>>()
        };
        let places = files.iter().enumerate().flat_map(names).collect();
        Ok(Self { folder: folder.to_owned(), files, places })
    }

    /// A vector of `size` elements.
    pub(super) fn vector(&self, name: &str, size: usize) -> Result<Vec<f32>, ModelError> {
        let mut out = Vec::with_capacity(size);
        self.read(name, &[size], |_, element| out.push(element))?;
        Ok(out)
    }

    /// A matrix `[rows, columns]`, as it lies.
    pub(super) fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Vec<f32>, ModelError> {
        let mut out = Vec::with_capacity(rows * columns);
        self.read(name, &[rows, columns], |_, element| out.push(element))?;
        Ok(out)
    }

    /// The weight `[outputs, inputs]` of a product, turned, as columns `at..at + outputs` of `into`, which has `width`
    /// columns.
    pub(super) fn turned_into(
        &self,
        name: &str,
        (outputs, inputs): (usize, usize),
        into: &mut [f32],
        width: usize,
        at: usize,
    ) -> Result<(), ModelError> {
        self.read(name, &[outputs, inputs], |index, element| {
            into[index % inputs * width + at + index / inputs] = element;
        })
    }

    /// Calls `take` with each element's index and value, in order.
    fn read(&self, name: &str, wanted: &[usize], mut take: impl FnMut(usize, f32)) -> Result<(), ModelError> {
        let Some(&place) = self.places.get(name) else {
            return Err(ModelError::MissingTensor { path: self.folder.clone(), tensor: name.to_owned() });
        };
        let file = &self.files[place];
        let info = file.metadata.info(name).expect("the name is from this file's header");
        if info.shape != wanted {
            return Err(ModelError::Misshapen {
                path: file.path.clone(),
                tensor: name.to_owned(),
                found: info.shape.clone(),
                wanted: wanted.to_vec(),
            });
        }
        let mut index = 0;
        let mut each = |element| {
            take(index, element);
            index += 1;
        };
        match info.dtype {
            Dtype::F32 => file.pieces::<4>(info, |bytes| each(f32::from_le_bytes(bytes))),
            Dtype::F16 => file.pieces::<2>(info, |bytes| each(f16::from_le_bytes(bytes).to_f32())),
            Dtype::BF16 => file.pieces::<2>(info, |bytes| each(bf16::from_le_bytes(bytes).to_f32())),
            other => Err(ModelError::Precision {
                path: file.path.clone(),
                tensor: name.to_owned(),
                found: format!("{other:?}"),
            }),
        }
    }
}

impl TensorFile {
    fn open(path: PathBuf) -> Result<Self, ModelError> {
        let unreadable = |source| ModelError::Read { path: path.clone(), source };
        let damaged = |what: String| ModelError::Damaged { path: path.clone(), what };
        let file = File::open(&path).map_err(unreadable)?;
        let file_bytes = file.metadata().map_err(unreadable)?.len();
        let mut length = [0; 8];
        if file_bytes < 8 {
            return Err(damaged(format!("it has {file_bytes} bytes")));
        }
        file.read_exact_at(&mut length, 0).map_err(unreadable)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length > file_bytes - 8 {
            return Err(damaged(format!("a header of {length} bytes in a file of {file_bytes}")));
        }
        let mut header = vec![0; usize::try_from(length).expect("at most MAX_HEADER")];
        file.read_exact_at(&mut header, 8).map_err(unreadable)?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| damaged(error.to_string()))?;
        let data_start = 8 + length;
        let data_bytes = metadata.data_len() as u64;
        if data_bytes != file_bytes - data_start {
            return Err(damaged(format!("{data_bytes} bytes of tensors, {} are there", file_bytes - data_start)));
        }
        Ok(Self { path, file, data_start, metadata })
    }

    /// Reads a tensor piece by piece and hands its elements over, `N` bytes each.
    fn pieces<const N: usize>(&self, info: &TensorInfo, mut each: impl FnMut([u8; N])) -> Result<(), ModelError> {
        let (begin, end) = info.data_offsets;
        let mut buffer = vec![0; PIECE.min(end - begin)];
        for start in (begin..end).step_by(PIECE) {
            let piece = &mut buffer[..PIECE.min(end - start)];
            let read = self.file.read_exact_at(piece, self.data_start + start as u64);
            read.map_err(|source| ModelError::Read { path: self.path.clone(), source })?;
            piece.as_chunks::<N>().0.iter().for_each(|&bytes| each(bytes));
        }
        Ok(())
    }
}
