//! What a model keeps per token: the input of every geometry.

use super::{Geometry, GeometryConfig, GeometryError};
use crate::units::{Buffer, Bytes, GroupId, LayerIndex};

/// What one layer caches per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// K and V for each KV head: MHA, GQA and MQA differ in `kv_heads` alone.
    Heads {
        /// Heads of K and V on this rank.
        kv_heads: u32,
        /// Elements of one K head.
        key_size: u32,
        /// Elements of one V head, nearly always the same.
        value_size: u32,
    },
    /// MLA: one latent vector per token, of any size (DeepSeek: 512 + 64 = 576).
    Latent {
        /// Elements of the latent vector.
        size: u32,
    },
}

/// A group of layers that share block ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers in the group.
    pub layers: u32,
    /// What each caches.
    pub attention: Attention,
    /// Bytes of one element: 2 for bf16, 1 for fp8.
    pub element_bytes: u32,
    /// Tokens in one block: 1, 16, 32, 64 and 128 are usual, any number works.
    pub block_tokens: u32,
}

impl KvShape {
    /// The ordinary case: K and V heads of one size.
    pub const fn heads(layers: u32, kv_heads: u32, head_size: u32, element_bytes: u32, block_tokens: u32) -> Self {
        let attention = Attention::Heads { kv_heads, key_size: head_size, value_size: head_size };
        Self { layers, attention, element_bytes, block_tokens }
    }

    /// MLA: one latent buffer.
    pub const fn latent(layers: u32, size: u32, element_bytes: u32, block_tokens: u32) -> Self {
        Self { layers, attention: Attention::Latent { size }, element_bytes, block_tokens }
    }

    /// Buffers per layer: 2 for K and V, 1 for a latent vector.
    pub const fn buffers_per_layer(&self) -> u32 {
        match self.attention {
            Attention::Heads { .. } => 2,
            Attention::Latent { .. } => 1,
        }
    }

    /// Bytes of one block in one layer's K or V.
    ///
    /// # Errors
    /// [`GeometryError::NoValueBuffer`] for V of MLA, [`GeometryError::Overflow`] past 64 bits.
    pub fn block_bytes(&self, buffer: Buffer) -> Result<Bytes, GeometryError> {
        let elements = match (self.attention, buffer) {
            (Attention::Heads { kv_heads, key_size, .. }, Buffer::Key) => u64::from(kv_heads) * u64::from(key_size),
            (Attention::Heads { kv_heads, value_size, .. }, Buffer::Value) => {
                u64::from(kv_heads) * u64::from(value_size)
            }
            (Attention::Latent { size }, Buffer::Key) => u64::from(size),
            (Attention::Latent { .. }, Buffer::Value) => return Err(GeometryError::NoValueBuffer),
        };
        elements
            .checked_mul(u64::from(self.element_bytes))
            .and_then(|bytes| bytes.checked_mul(u64::from(self.block_tokens)))
            .map(Bytes)
            .ok_or(GeometryError::Overflow { what: "the size of a block" })
    }

    /// The buffers of one layer.
    pub fn buffers(&self) -> &'static [Buffer] {
        match self.attention {
            Attention::Heads { .. } => &[Buffer::Key, Buffer::Value],
            Attention::Latent { .. } => &[Buffer::Key],
        }
    }

    /// Refuses shapes with a zero in them.
    pub(super) fn check(&self) -> Result<(), GeometryError> {
        let (a, b, c) = match self.attention {
            Attention::Heads { kv_heads, key_size, value_size } => {
                (("the number of KV heads", kv_heads), ("the K head size", key_size), ("the V head size", value_size))
            }
            Attention::Latent { size } => {
                let latent = ("the latent size", size);
                (latent, latent, latent)
            }
        };
        let common = [
            ("the number of layers", self.layers),
            ("the element size", self.element_bytes),
            ("the block size", self.block_tokens),
        ];
        match common.into_iter().chain([a, b, c]).find(|&(_, value)| value == 0) {
            Some((field, _)) => Err(GeometryError::Zero { field }),
            None => Ok(()),
        }
    }

    /// Position of a buffer among all of the group: L0.K, L0.V, L1.K, ... In 64 bits: no number of layers overflows it.
    pub(super) fn buffer_index(&self, layer: LayerIndex, buffer: Buffer) -> Result<u64, GeometryError> {
        if layer.0 >= self.layers {
            return Err(GeometryError::LayerOutOfRange { layer, layers: self.layers });
        }
        let place = self.buffers().iter().position(|&kept| kept == buffer).ok_or(GeometryError::NoValueBuffer)?;
        Ok(u64::from(layer.0) * u64::from(self.buffers_per_layer()) + place as u64)
    }
}

/// All groups of a model, each with a reservation of its own.
///
/// Hybrid models keep groups with different shapes (full and sliding-window attention, say). Address space costs
/// nothing, so each group's reservation has room for the whole budget; what is mapped in all of them together is
/// the pool's limit, not the geometry's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelGeometry {
    groups: Vec<(GroupId, Geometry)>,
}

impl ModelGeometry {
    /// One geometry per group.
    ///
    /// # Errors
    /// No group, one id twice, or any group's own [`GeometryError`].
    pub fn new(groups: &[(GroupId, GeometryConfig)]) -> Result<Self, GeometryError> {
        if groups.is_empty() {
            return Err(GeometryError::NoGroups);
        }
        let mut built: Vec<(GroupId, Geometry)> = Vec::with_capacity(groups.len());
        for (group, config) in groups {
            if built.iter().any(|(other, _)| other == group) {
                return Err(GeometryError::DuplicateGroup { group: *group });
            }
            built.push((*group, Geometry::new(config)?));
        }
        Ok(Self { groups: built })
    }

    /// The geometry of one group.
    ///
    /// # Errors
    /// [`GeometryError::UnknownGroup`].
    pub fn group(&self, group: GroupId) -> Result<&Geometry, GeometryError> {
        self.iter()
            .find(|(id, _)| *id == group)
            .map(|(_, geometry)| geometry)
            .ok_or(GeometryError::UnknownGroup { group })
    }

    /// Every group with its geometry, in the order given.
    pub fn iter(&self) -> impl Iterator<Item = (GroupId, &Geometry)> {
        self.groups.iter().map(|(id, geometry)| (*id, geometry))
    }
}
