//! Quantised weights as a source of ordinary tensors, and ordinary tensors as a source of block-scaled FP8.
//!
//! A quantised weight is stored as several tensors, its parts: packed values, scales, zero points. [`add_to`] adds a file to
//! an index that has one tensor of floats for each weight. The file does not exist: the bytes of a range of it are computed
//! from the parts when they are read. So the plans, casts and writers of the core apply to it as to any other file, and
//! their memory does not grow with the weights.
//!
//! ```text
//! for each tile of the range:       # complete rows of a matrix, or a part of one row
//!     read the region of each part that belongs to the tile, by the index that has the parts
//!     compute the values as the recipe of the weight says
//! ```

mod blocks;
mod grids;
mod numbers;
mod part;
mod quantise;
mod recipe;

pub use blocks::Block;
pub use recipe::Recipe;

use half::{bf16, f16};
use part::Part;
use quantise::Code;
use recipe::Tile;
use reshard_core::dtype::Dtype;
use reshard_core::index::Index;
use reshard_core::listed::{Listed, ListedTensor};
use reshard_core::region::row_major_strides;
use reshard_core::shard_file::Format;
use reshard_core::source::{Ranges, Source};
use reshard_core::{Error, Kind, Result};
use std::path::PathBuf;
use std::sync::Arc;

/// Values that are computed together: their parts stay in the cache of a processor.
const TILE: u64 = 1 << 18;

/// A quantised weight.
#[derive(Debug)]
pub struct Weight {
    /// Its name in the file.
    pub name: String,
    /// The dtype in which its values are returned: F32, BF16 or F16; of codes E4M3.
    pub dtype: Dtype,
    /// Its shape in elements. The last two dims are those of its matrices.
    pub shape: Vec<u64>,
    /// How its values are computed.
    pub recipe: Recipe,
    /// The keys of its parts in the index of the parts, in the order of the recipe.
    pub parts: Vec<String>,
}

/// Adds a file with the values of quantised weights to an index, and returns its number.
///
/// Args:
///     `index`: the index.
///     `stored`: an index with the parts.
///     `path`: names the file in messages.
///     `weights`: the weights.
///
/// # Errors
/// A dtype is none of a weight, or a part is not in the index.
pub fn add_to(
    index: &mut Index,
    stored: Index,
    path: PathBuf,
    weights: Vec<Weight>,
) -> Result<u32> {
    let values = Arc::new(Values::new(stored, weights)?);
    let (n_bytes, named) = (values.n_bytes, path.clone());
    let tensors: Arc<[ListedTensor]> = values.tensors().collect();
    let read = move |source: &Source| Listed::new(tensors.to_vec(), Vec::new(), source.n_bytes());
    let open = move || {
        let ranges = Box::new(Shared(Arc::clone(&values)));
        Ok(Source::of_ranges(path.clone(), n_bytes, ranges))
    };
    Ok(index.add_source(named, Format::Listed(Arc::new(read)), open))
}

#[derive(Debug)]
struct Values {
    stored: Index,
    weights: Vec<(Weight, Vec<Part>)>,
    /// The first byte of each weight.
    starts: Vec<u64>,
    n_bytes: u64,
}

impl Values {
    fn new(stored: Index, weights: Vec<Weight>) -> Result<Self> {
        let mut found = Vec::with_capacity(weights.len());
        let (mut starts, mut n_bytes) = (Vec::with_capacity(weights.len()), 0_u64);
        for weight in weights {
            let bad = |what: &str| {
                Error::new(Kind::Argument, format!("`{}` {what}", weight.name)).key(&weight.name)
            };
            let is_right = match weight.recipe {
                Recipe::Codes { .. } => weight.dtype == Dtype::F8E4M3,
                _ => matches!(weight.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16),
            };
            if !is_right {
                return Err(bad("has a dtype that its recipe does not have"));
            }
            let size = weight.dtype.n_bytes(&weight.shape);
            let size = size.ok_or_else(|| bad("has too many elements"))?;
            let parts = weight.parts.iter().map(|key| Part::new(&stored, key));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            starts.push(n_bytes);
            n_bytes = n_bytes
                .checked_next_multiple_of(64)
                .and_then(|at| {
                    *starts.last_mut().expect("just added") = at;
                    at.checked_add(size)
                })
                .ok_or_else(|| bad("has too many elements"))?;
            found.push((weight, parts));
        }
        Ok(Self {
            stored,
            weights: found,
            starts,
            n_bytes,
        })
    }

    fn tensors(&self) -> impl Iterator<Item = ListedTensor> {
        let weights = self.weights.iter().zip(&self.starts);
        weights.map(|((weight, _), start)| ListedTensor {
            name: weight.name.clone(),
            dtype: weight.dtype,
            shape: weight.shape.clone(),
            strides: row_major_strides(&weight.shape),
            start: *start,
        })
    }

    /// Fills a range of the file, which can hold several weights.
    fn read(&self, start: u64, to: &mut [u8]) -> Result<()> {
        let first = self.starts.partition_point(|at| *at <= start);
        let first = first.checked_sub(1);
        let first = first.ok_or_else(|| Error::damaged("a range lies before the first weight"))?;
        let (mut at, mut rest) = (start, to);
        for ((weight, parts), begin) in self.weights.iter().zip(&self.starts).skip(first) {
            if rest.is_empty() {
                break;
            }
            // Between two weights are bytes of no weight.
            let skipped = begin.saturating_sub(at).min(rest.len() as u64);
            let (gap, after) = rest.split_at_mut(skipped as usize);
            gap.fill(0);
            at += skipped;
            let n_bytes = weight.dtype.n_bytes(&weight.shape).unwrap_or(0);
            let left = (begin + n_bytes).saturating_sub(at).min(after.len() as u64);
            let (of_weight, after) = after.split_at_mut(left as usize);
            let filled = self.fill_bytes(weight, parts, at - begin.min(&at), of_weight);
            filled.map_err(|error| error.key(&weight.name))?;
            at += left;
            rest = after;
        }
        rest.fill(0);
        Ok(())
    }

    /// Fills bytes of a weight from byte `at` on. They may begin and end inside an element.
    fn fill_bytes(&self, weight: &Weight, parts: &[Part], at: u64, to: &mut [u8]) -> Result<()> {
        let unit = weight.dtype.unit().1;
        if at.is_multiple_of(unit) && (to.len() as u64).is_multiple_of(unit) {
            return self.fill(weight, parts, at / unit, to);
        }
        let (first, end) = (at / unit, (at + to.len() as u64).div_ceil(unit));
        let mut scratch = vec![0; ((end - first) * unit) as usize];
        self.fill(weight, parts, first, &mut scratch)?;
        let skipped = (at - first * unit) as usize;
        to.copy_from_slice(&scratch[skipped..skipped + to.len()]);
        Ok(())
    }

    /// Fills elements of a weight from `start` on.
    fn fill(&self, weight: &Weight, parts: &[Part], start: u64, to: &mut [u8]) -> Result<()> {
        let shape = match weight.recipe {
            // Its parts know no rows.
            Recipe::Table { .. } => &[weight.shape.iter().product()][..],
            _ => &weight.shape,
        };
        let n_columns = shape.last().copied().unwrap_or(1);
        let n_rows = shape.len().checked_sub(2).map_or(1, |dim| shape[dim]);
        let unit = weight.dtype.unit().1;
        let (mut at, mut rest) = (start, to);
        while !rest.is_empty() {
            let left = rest.len() as u64 / unit;
            let (row, column) = (at / n_columns, at % n_columns);
            let (matrix, row) = (row / n_rows, row % n_rows);
            let tile = if column > 0 || left < n_columns || n_columns >= TILE {
                let end = (column + left).min(n_columns).min(column + TILE);
                Tile {
                    matrix,
                    rows: row..row + 1,
                    columns: column..end,
                }
            } else {
                let most = (TILE / n_columns).max(weight.recipe.n_rows());
                let end = (row + most.min(left / n_columns)).min(n_rows);
                // Rows that share bytes of the parts are not divided.
                let aligned = end / weight.recipe.n_rows() * weight.recipe.n_rows();
                let end = if aligned > row { aligned } else { end };
                Tile {
                    matrix,
                    rows: row..end,
                    columns: 0..n_columns,
                }
            };
            let n = (tile.rows.end - tile.rows.start) * (tile.columns.end - tile.columns.start);
            let (part, after) = rest.split_at_mut((n * unit) as usize);
            let (recipe, index) = (&weight.recipe, &self.stored);
            match weight.dtype {
                Dtype::F32 => recipe.fill::<f32>(index, parts, &tile, part)?,
                Dtype::Bf16 => recipe.fill::<bf16>(index, parts, &tile, part)?,
                Dtype::F8E4M3 => recipe.fill::<Code>(index, parts, &tile, part)?,
                _ => recipe.fill::<f16>(index, parts, &tile, part)?,
            }
            at += n;
            rest = after;
        }
        Ok(())
    }
}

/// The values, which every opened file of the same index shares.
#[derive(Debug)]
struct Shared(Arc<Values>);

impl Ranges for Shared {
    fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
        self.0.read(start, to)
    }
}
