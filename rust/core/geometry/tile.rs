//! Tiles: a region of the global tensor and its position in a local array.

use crate::geometry::region::Region;

/// The region `global` is stored in the local array from element `local_offset` on, with element strides
/// `local_strides`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Tile {
    /// The region of the global tensor.
    pub global: Region,
    /// Element of the local array at which the region begins.
    pub local_offset: u64,
    /// Strides in the local array in elements, one per global dim.
    pub local_strides: Vec<u64>,
}

impl Tile {
    /// The element of the local array that stores a global element of this tile.
    pub fn local_at(&self, global: &[u64]) -> u64 {
        let steps = global
            .iter()
            .zip(self.global.offset())
            .zip(&self.local_strides);
        self.local_offset
            + steps
                .map(|((at, start), stride)| (at - start) * stride)
                .sum::<u64>()
    }

    /// One past the last local element; `None` if that overflows.
    pub fn local_end(&self) -> Option<u64> {
        if self.global.is_empty() {
            return Some(self.local_offset);
        }
        let extents = self.global.shape().iter().zip(&self.local_strides);
        extents.clone().try_fold(
            self.local_offset.checked_add(1)?,
            |end, (extent, stride)| end.checked_add((extent - 1).checked_mul(*stride)?),
        )
    }
}
