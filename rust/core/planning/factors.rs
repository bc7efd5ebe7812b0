//! Factored dims: index `r` of a dim with extent `n0 * n1` is `(r / n1, r % n1)`, and likewise for more factors.
//!
//! Interleaved rows of two tensors are one region each in factored dims. In the dims of the tensor, the public dims,
//! each row would be a tile. A region of the public dims is a few regions of the factored dims: a head, a middle and a
//! tail per dim. A region of the factored dims is one public region per run, or is described by its bounding box.

use crate::error::{Error, Kind, Result};
use crate::geometry::region::{Dims, Region, flat_range_boxes, row_major_strides};
use crate::geometry::tile::Tile;
use std::collections::BTreeMap;

/// Most dims that factors may add to a tensor. It limits a region to a few thousand factored regions.
const MAX_ADDED_DIMS: usize = 8;

/// The factors of every dim of a tensor; a dim without factors has its extent as the only one.
#[derive(Debug)]
pub(crate) struct Factors(Vec<Vec<u64>>);

/// A part of a tile along one public dim.
struct Segment {
    /// Its region in the factors of the dim, or in the dim itself.
    region: Region,
    /// Elements of the local array from the start of the tile to the start of the segment.
    skipped: u64,
    /// Strides in the local array.
    strides: Vec<u64>,
}

impl Factors {
    /// Checks the factors of some dims of a shape; `None` if no dim has factors.
    pub(crate) fn new(shape: &[u64], factors: BTreeMap<usize, Vec<u64>>) -> Result<Option<Self>> {
        if factors.is_empty() {
            return Ok(None);
        }
        let bad = |message: String| Err(Error::new(Kind::Argument, message));
        let mut of_dims: Vec<Vec<u64>> = shape.iter().map(|&extent| vec![extent]).collect();
        let mut n_added = 0;
        for (dim, own) in factors {
            let Some(&extent) = shape.get(dim) else {
                return bad(format!(
                    "factors of dim {dim}: the shape {} has no such dim",
                    Dims(shape)
                ));
            };
            n_added += own.len().saturating_sub(1);
            if n_added > MAX_ADDED_DIMS {
                return bad(format!(
                    "the factors add more than {MAX_ADDED_DIMS} dims to those of the shape {}",
                    Dims(shape)
                ));
            }
            let product = own.iter().try_fold(1_u64, |n, &factor| {
                (factor > 0).then(|| n.checked_mul(factor))?
            });
            if own.is_empty() || product != Some(extent) {
                return bad(format!(
                    "factors {} of dim {dim}: expected positive numbers with the product {extent}, the extent of the dim",
                    Dims(&own)
                ));
            }
            of_dims[dim] = own;
        }
        Ok(Some(Self(of_dims)))
    }

    /// The shape in the factored dims.
    pub(crate) fn shape(&self) -> Vec<u64> {
        self.0.concat()
    }

    /// Converts a tile of the public dims to disjoint tiles of the factored dims: at most `2 n - 1` per dim of `n`
    /// factors.
    pub(crate) fn split(&self, tile: &Tile) -> Vec<Tile> {
        if tile.global.is_empty() {
            return Vec::new();
        }
        let sides = self.0.iter().enumerate().map(|(dim, factors)| {
            let (start, stride) = (tile.global.offset()[dim], tile.local_strides[dim]);
            let weights = row_major_strides(factors);
            let boxes = flat_range_boxes(factors, start, tile.global.end(dim));
            let boxes = boxes.into_iter().map(|region| Segment {
                skipped: (dot(region.offset(), &weights) - start) * stride,
                strides: weights.iter().map(|weight| weight * stride).collect(),
                region,
            });
            boxes.collect()
        });
        product(tile.local_offset, sides)
    }

    /// Converts a tile of the factored dims to tiles of the public dims, one per run.
    pub(crate) fn join(&self, tile: &Tile) -> Vec<Tile> {
        let runs = self.runs(&tile.global, &tile.local_strides);
        product(tile.local_offset, runs.map(|runs| runs.segments()))
    }

    /// Number of tiles that [`Self::join`] returns.
    pub(crate) fn n_runs(&self, region: &Region, strides: &[u64]) -> u64 {
        let repeats = |runs: Runs| runs.repeats.iter().map(|repeat| repeat.n).product::<u64>();
        self.runs(region, strides).map(repeats).product()
    }

    /// The bounding box in the public dims of a region of the factored dims.
    pub(crate) fn bounding_box(&self, region: &Region) -> Region {
        self.public(region, |runs| {
            let span = |repeat: &Repeat| (repeat.n - 1) * repeat.step;
            runs.len + runs.repeats.iter().map(span).sum::<u64>()
        })
    }

    /// The first run of a region of the factored dims, as a region of the public dims.
    pub(crate) fn first_run(&self, region: &Region) -> Region {
        self.public(region, |runs| runs.len)
    }

    fn public(&self, region: &Region, extent: impl Fn(&Runs) -> u64) -> Region {
        // With local strides of 0, runs are as long as they are in the tensor.
        let runs: Vec<_> = self.runs(region, &vec![0; region.rank()]).collect();
        let offset = runs.iter().map(|runs| runs.first).collect();
        inside(offset, runs.iter().map(extent).collect())
    }

    /// The runs of a nonempty region of the factored dims, along each public dim.
    fn runs(&self, region: &Region, strides: &[u64]) -> impl Iterator<Item = Runs> {
        let mut start = 0;
        self.0.iter().map(move |factors| {
            let own = start..start + factors.len();
            start = own.end;
            let (offset, shape) = (&region.offset()[own.clone()], &region.shape()[own.clone()]);
            Runs::new(&row_major_strides(factors), offset, shape, &strides[own])
        })
    }
}

/// A region of the factors of one public dim: a run of elements that is repeated.
struct Runs {
    first: u64,
    len: u64,
    /// Stride of a run in the local array.
    stride: u64,
    /// Innermost first.
    repeats: Vec<Repeat>,
}

struct Repeat {
    n: u64,
    step: u64,
    /// The same step in the local array.
    local_step: u64,
}

impl Runs {
    fn new(weights: &[u64], offset: &[u64], shape: &[u64], strides: &[u64]) -> Self {
        let mut runs = Self {
            first: dot(offset, weights),
            len: 1,
            stride: 1,
            repeats: Vec::new(),
        };
        for ((&n, &step), &local_step) in shape.iter().zip(weights).zip(strides).rev() {
            let is_one = runs.len == 1;
            if n == 1 {
                continue;
            }
            // A dim that is contiguous on both sides extends the run. After a repeat, all steps exceed the run.
            if step == runs.len && (is_one || local_step == runs.len * runs.stride) {
                runs.len *= n;
                runs.stride = if is_one { local_step } else { runs.stride };
            } else {
                runs.repeats.push(Repeat {
                    n,
                    step,
                    local_step,
                });
            }
        }
        runs
    }

    fn segments(&self) -> Vec<Segment> {
        let starts = self
            .repeats
            .iter()
            .rev()
            .fold(vec![(self.first, 0)], |starts, repeat| {
                let repeated = |(at, skipped)| {
                    (0..repeat.n)
                        .map(move |k| (at + k * repeat.step, skipped + k * repeat.local_step))
                };
                starts.into_iter().flat_map(repeated).collect()
            });
        let segment = |(at, skipped)| Segment {
            region: inside(vec![at], vec![self.len]),
            skipped,
            strides: vec![self.stride],
        };
        starts.into_iter().map(segment).collect()
    }
}

/// The product of the segments along each public dim, as tiles.
fn product(local_offset: u64, sides: impl Iterator<Item = Vec<Segment>>) -> Vec<Tile> {
    let empty = Tile {
        global: Region::whole(&[]),
        local_offset,
        local_strides: Vec::new(),
    };
    sides.fold(vec![empty], |tiles, side| {
        let longer = tiles.iter().flat_map(|tile| {
            side.iter().map(|segment| {
                let (before, own) = (&tile.global, &segment.region);
                Tile {
                    global: inside(
                        [before.offset(), own.offset()].concat(),
                        [before.shape(), own.shape()].concat(),
                    ),
                    local_offset: tile.local_offset + segment.skipped,
                    local_strides: [&tile.local_strides[..], &segment.strides].concat(),
                }
            })
        });
        longer.collect()
    })
}

fn inside(offset: Vec<u64>, shape: Vec<u64>) -> Region {
    Region::new(offset, shape).expect("inside a tensor whose size fits")
}

fn dot(a: &[u64], b: &[u64]) -> u64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
