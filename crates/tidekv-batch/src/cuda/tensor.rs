//! A step's arrays as tensors: pointer, shape, strides and type, in the terms of DLPack.
//!
//! Nothing is copied and nothing moves: the addresses are those of the batch for its whole life, so a captured graph may hold them.
//! What a step writes is there for all work that is ordered behind the step on its stream, until the next step.

/// What a tensor's elements are, as `DLDataType` counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataType {
    /// `kDLInt` is 0.
    pub code: u8,
    /// Bits of one element.
    pub bits: u8,
    /// Elements of one vector: 1.
    pub lanes: u16,
}

impl DataType {
    /// 32-bit integers.
    pub const I32: Self = Self { code: 0, bits: 32, lanes: 1 };
    /// 64-bit integers.
    pub const I64: Self = Self { code: 0, bits: 64, lanes: 1 };
}

/// `kDLCUDA`, the device type of DLPack for memory of an NVIDIA GPU.
pub const DLPACK_CUDA: i32 = 2;

/// An array on the device. The batch owns the memory: keep it alive while the address is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTensor {
    /// Address of the first element.
    pub address: u64,
    /// Number of the device, as CUDA counts them; with [`DLPACK_CUDA`] a `DLDevice`.
    pub device: u32,
    /// Type of the elements.
    pub data_type: DataType,
    /// How many of the dimensions below count: 1 or 2.
    pub dimensions: u8,
    /// Elements in each dimension.
    pub shape: [i64; 2],
    /// Elements from one to the next, in each dimension.
    pub strides: [i64; 2],
}

impl DeviceTensor {
    pub(super) fn vector(device: u32, address: u64, data_type: DataType, len: u32) -> Self {
        Self { address, device, data_type, dimensions: 1, shape: [len.into(), 1], strides: [1, 1] }
    }

    pub(super) fn matrix(device: u32, address: u64, shape: [u32; 2], stride: u32) -> Self {
        let shape = shape.map(i64::from);
        Self { address, device, data_type: DataType::I32, dimensions: 2, shape, strides: [stride.into(), 1] }
    }
}

/// The arrays of the latest step, [`Metadata`](crate::Metadata)'s fields on the device, with its padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTensors {
    /// `[tokens]`, 64 bits.
    pub slot_mapping: DeviceTensor,
    /// `[rows, blocks of the longest row]`, a view of the table itself. Rows behind the batch, and entries behind a row's
    /// tokens, are whatever was there last.
    pub block_tables: DeviceTensor,
    /// `[rows]`.
    pub seq_lens: DeviceTensor,
    /// `[rows]`.
    pub context_lens: DeviceTensor,
    /// `[rows + 1]`.
    pub query_start_loc: DeviceTensor,
    /// `[rows + 1]`.
    pub seq_start_loc: DeviceTensor,
}
