//! The tensors of one file, each joined from the parts in which it is stored.

use crate::files::header::Entry;
use crate::geometry::dtype::Dtype;
use crate::geometry::region::{Region, row_major_strides};
use crate::geometry::tile::Tile;

/// A tensor of a file, stored in one or several parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalArray {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its shape in elements.
    pub shape: Vec<u64>,
    /// Its stored parts.
    pub parts: Vec<Part>,
}

/// A stored part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The name under which it is stored.
    pub name: String,
    /// Its stored shape.
    pub shape: Vec<u64>,
    /// The tiles of the tensor that it stores.
    pub tiles: Vec<Tile>,
}

impl LocalArray {
    /// A tensor that is stored in one part.
    pub(crate) fn whole(entry: &Entry<'_>) -> Self {
        let tile = Tile {
            global: Region::whole(&entry.shape),
            local_offset: 0,
            local_strides: row_major_strides(&entry.shape),
        };
        Self {
            name: entry.name.to_owned(),
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            parts: vec![Part {
                name: entry.name.to_owned(),
                shape: entry.shape.clone(),
                tiles: vec![tile],
            }],
        }
    }
}
