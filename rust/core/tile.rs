//! The one idea: a box of the global tensor and where it lies in a local one.

use crate::region::Region;

/// `global` lies in the local array at element `local_offset` with element strides `local_strides`, one a global dim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tile {
    /// The box of the global tensor.
    pub global: Region,
    /// Element of the local array at which the box begins.
    pub local_offset: u64,
    /// Elements between neighbours in the local array, one a global dim.
    pub local_strides: Vec<u64>,
}

impl Tile {
    /// Element of the local array that holds a global element of this tile.
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
