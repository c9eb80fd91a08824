//! Whether a strided view stays inside the bytes it is a view of: the one check between Python's numbers and addresses.

use crate::dtype::Dtype;

/// A view as DLPack describes it, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Strided {
    pub(crate) offset: u64,
    pub(crate) shape: Vec<i64>,
    pub(crate) strides: Vec<i64>,
    pub(crate) dtype: Dtype,
}

impl Strided {
    /// A view of a range of `limit` bytes, or what is wrong with it. Without strides it is dense, the last index fastest.
    pub(crate) fn within(
        limit: u64,
        offset: u64,
        dtype: Dtype,
        shape: Vec<i64>,
        strides: Option<Vec<i64>>,
    ) -> Result<Self, String> {
        if shape.iter().any(|&size| size < 0) {
            return Err(format!("the shape {shape:?} has a negative size"));
        }
        if !offset.is_multiple_of(u64::from(dtype.bytes)) {
            let Dtype { name, bytes, .. } = dtype;
            return Err(format!("an offset of {offset} bytes is not aligned for {name}: use a multiple of {bytes}"));
        }
        let strides = match strides {
            Some(strides) if strides.len() != shape.len() => {
                return Err(format!("{} strides for {} sizes: give one for each", strides.len(), shape.len()));
            }
            Some(strides) if strides.iter().any(|&stride| stride < 0) => {
                return Err(format!("the strides {strides:?} go backwards: give positive ones"));
            }
            Some(strides) => strides,
            None => {
                dense(&shape).ok_or_else(|| format!("the shape {shape:?} has more elements than can be counted"))?
            }
        };
        let view = Self { offset, shape, strides, dtype };
        match view.end() {
            Some(end) if end <= limit => Ok(view),
            Some(end) => Err(format!("the view ends at byte {end} of a range of {limit}: make it smaller")),
            None => Err("the view ends beyond all addresses: make it smaller".to_owned()),
        }
    }

    /// One past its last byte.
    fn end(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(self.offset);
        }
        let mut last: u64 = 0;
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            let steps = u64::try_from(size - 1).ok()?;
            last = last.checked_add(steps.checked_mul(u64::try_from(stride).ok()?)?)?;
        }
        last.checked_add(1)?.checked_mul(u64::from(self.dtype.bytes))?.checked_add(self.offset)
    }

    /// Bytes of its elements, each counted once.
    pub(crate) fn element_bytes(&self) -> u64 {
        let elements: i128 = self.shape.iter().map(|&size| i128::from(size)).product();
        u64::try_from(elements * i128::from(self.dtype.bytes)).unwrap_or(u64::MAX)
    }
}

fn dense(shape: &[i64]) -> Option<Vec<i64>> {
    let mut strides = vec![1i64; shape.len()];
    for place in (0..shape.len().saturating_sub(1)).rev() {
        strides[place] = strides[place + 1].checked_mul(shape[place + 1].max(1))?;
    }
    Some(strides)
}
