//! Where a reservation's pages and their handles lie: all that the memory back-ends need to know.
//!
//! ```text
//!   one handle per page (slab, interleaved)          several handles per page (per-layer)
//!
//!   |<-- page_stride -->|                            |<------- handle_stride -------->|
//!   [ page 0 ]..........[ page 1 ]..........         [ p0.h0 | p1.h0 | p2.h0 | ... ]  [ p0.h1 | p1.h1 | ...
//!   |<----->| handle_bytes
//!
//!   offset(page, handle) = page * page_stride + handle * handle_stride
//! ```

use super::GeometryError;
use crate::units::{ByteOffset, Bytes, PageId};

/// Largest reservation we ask for: half of what an x86-64 process can address.
pub(super) const ADDRESS_SPACE_LIMIT: Bytes = Bytes(1 << 46);

/// The bytes of one handle inside the reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it starts.
    pub offset: ByteOffset,
    /// How long it is.
    pub bytes: Bytes,
}

/// Which handle a byte belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The page id.
    pub page: PageId,
    /// Which of the page's handles.
    pub handle: u32,
    /// Bytes from the handle's start.
    pub within: u64,
}

/// Pages and handles of one reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    page_count: u32,
    handles_per_page: u32,
    handle_bytes: u64,
    page_stride: u64,
    handle_stride: u64,
}

impl Placement {
    /// Pages side by side, one handle each.
    ///
    /// # Errors
    /// A size of zero, or past the address space.
    pub fn uniform(page_bytes: Bytes, page_count: u32) -> Result<Self, GeometryError> {
        Self::strided(page_bytes, page_bytes, page_count)
    }

    /// Pages of one handle each, `page_stride` apart.
    pub(super) fn strided(handle_bytes: Bytes, page_stride: Bytes, page_count: u32) -> Result<Self, GeometryError> {
        let handle_stride = page_stride
            .0
            .checked_mul(u64::from(page_count))
            .ok_or(GeometryError::Overflow { what: "the reservation" })?;
        Self {
            page_count,
            handles_per_page: 1,
            handle_bytes: handle_bytes.0,
            page_stride: page_stride.0,
            handle_stride,
        }
        .checked()
    }

    /// `handles_per_page` regions side by side; every page has one handle in each.
    ///
    /// # Errors
    /// As [`uniform`](Self::uniform).
    pub fn regions(handle_bytes: Bytes, page_count: u32, handles_per_page: u32) -> Result<Self, GeometryError> {
        Self { handles_per_page, ..Self::strided(handle_bytes, handle_bytes, page_count)? }.checked()
    }

    fn checked(self) -> Result<Self, GeometryError> {
        for (field, value) in [
            ("the number of pages", u64::from(self.page_count)),
            ("the handles per page", u64::from(self.handles_per_page)),
            ("the page size", self.handle_bytes),
        ] {
            if value == 0 {
                return Err(GeometryError::Zero { field });
            }
        }
        let needed = self
            .handle_stride
            .checked_mul(u64::from(self.handles_per_page))
            .map(Bytes)
            .ok_or(GeometryError::Overflow { what: "the reservation" })?;
        if needed > ADDRESS_SPACE_LIMIT {
            return Err(GeometryError::AddressSpace { needed, limit: ADDRESS_SPACE_LIMIT });
        }
        Ok(self)
    }

    /// Page ids are `0..page_count`.
    pub const fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Driver handles behind one page id.
    pub const fn handles_per_page(&self) -> u32 {
        self.handles_per_page
    }

    /// Bytes of one handle.
    pub const fn handle_bytes(&self) -> Bytes {
        Bytes(self.handle_bytes)
    }

    /// What one page id costs in memory.
    pub fn page_bytes(&self) -> Bytes {
        Bytes(self.handle_bytes * u64::from(self.handles_per_page))
    }

    /// Address space of the whole reservation.
    pub const fn reservation_bytes(&self) -> Bytes {
        Bytes(self.handle_stride * self.handles_per_page as u64)
    }

    /// Number of a handle among all of the reservation, page by page.
    pub fn slot(&self, page: PageId, handle: u32) -> usize {
        page.index() * self.handles_per_page as usize + handle as usize
    }

    /// Where a handle's bytes lie.
    ///
    /// # Panics
    /// When the page or the handle is out of range: ids from outside are checked by
    /// [`Geometry::check_page`](super::Geometry::check_page) first.
    pub fn extent(&self, page: PageId, handle: u32) -> Extent {
        assert!(
            page.0 < self.page_count && handle < self.handles_per_page,
            "page {page} handle {handle} is outside {self:?}"
        );
        let offset = u64::from(page.0) * self.page_stride + u64::from(handle) * self.handle_stride;
        Extent { offset: ByteOffset(offset), bytes: Bytes(self.handle_bytes) }
    }

    /// Which handle holds the byte at `offset`; `None` for the gaps between pages and past the end.
    pub fn locate(&self, offset: ByteOffset) -> Option<Place> {
        let handle = u32::try_from(offset.0 / self.handle_stride).ok().filter(|&h| h < self.handles_per_page)?;
        let in_region = offset.0 % self.handle_stride;
        let page = u32::try_from(in_region / self.page_stride).ok()?;
        let within = in_region % self.page_stride;
        (within < self.handle_bytes).then_some(Place { page: PageId(page), handle, within })
    }
}
