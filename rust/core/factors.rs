//! Dims that are described by several: row `r` of an extent `n0 * n1` is `(r / n1, r % n1)`, and so on for more factors.
//!
//! Rows of two tensors that take turns are one box each in such dims, where every row would be a tile of its own. A box
//! of the public dims is a few boxes of the factored ones: along each dim a head, a middle and a tail. The other way it
//! is as many as it has runs, so what is told of it in passing is the box around them.

use crate::error::{Error, Kind, Result};
use crate::region::{Dims, Region, flat_range_boxes, row_major_strides};
use crate::tile::Tile;
use std::collections::BTreeMap;

/// Dims that factors may add to a tensor: so a box becomes some thousands at the very most.
const MAX_ADDED_DIMS: usize = 8;

/// The factors of every dim of a tensor; of a dim that is described by itself, its extent.
#[derive(Debug)]
pub(crate) struct Factors(Vec<Vec<u64>>);

/// A part of a tile along one public dim, in one naming of it: where it lies, and how in the local array.
struct Segment {
    region: Region,
    /// Elements of the local array before it.
    skipped: u64,
    strides: Vec<u64>,
}

impl Factors {
    /// Checked factors of some dims of a shape; `None` if no dim has any.
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
                    "factors of dim {dim}: the shape is {}",
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
                    "factors {} of dim {dim}: expected numbers above 0 whose product is its extent {extent}",
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

    /// A tile of the public dims as tiles of the factored ones, disjoint: at most `2 n - 1` along a dim of `n` factors.
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

    /// A tile of the factored dims as tiles of the public ones: one a run.
    pub(crate) fn join(&self, tile: &Tile) -> Vec<Tile> {
        let runs = self.runs(&tile.global, &tile.local_strides);
        product(tile.local_offset, runs.map(|runs| runs.segments()))
    }

    /// Into how many tiles `join` takes a tile of the factored dims.
    pub(crate) fn n_runs(&self, region: &Region, strides: &[u64]) -> u64 {
        let repeats = |runs: Runs| runs.repeats.iter().map(|repeat| repeat.n).product::<u64>();
        self.runs(region, strides).map(repeats).product()
    }

    /// The smallest box of the public dims around a box of the factored ones.
    pub(crate) fn around(&self, region: &Region) -> Region {
        self.public(region, |runs| {
            let span = |repeat: &Repeat| (repeat.n - 1) * repeat.step;
            runs.len + runs.repeats.iter().map(span).sum::<u64>()
        })
    }

    /// A box of the public dims that lies in a box of the factored ones, and begins where that does.
    pub(crate) fn first_run(&self, region: &Region) -> Region {
        self.public(region, |runs| runs.len)
    }

    fn public(&self, region: &Region, extent: impl Fn(&Runs) -> u64) -> Region {
        // Where no element is any way from the next in a local array, runs are as long as they are in the tensor.
        let runs: Vec<_> = self.runs(region, &vec![0; region.rank()]).collect();
        let offset = runs.iter().map(|runs| runs.first).collect();
        inside(offset, runs.iter().map(extent).collect())
    }

    /// Along each public dim, what a box of the factored dims is there; it is not empty.
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

/// A box of factored dims along the public dim: a run of elements, repeated.
struct Runs {
    first: u64,
    len: u64,
    /// From one element of a run to the next in the local array.
    stride: u64,
    /// The innermost first.
    repeats: Vec<Repeat>,
}

struct Repeat {
    n: u64,
    step: u64,
    /// The step in the local array.
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
            // Neighbours on both sides lengthen the run. Once something was repeated, steps are longer than it is.
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
                let again = |(at, skipped)| {
                    (0..repeat.n)
                        .map(move |k| (at + k * repeat.step, skipped + k * repeat.local_step))
                };
                starts.into_iter().flat_map(again).collect()
            });
        let segment = |(at, skipped)| Segment {
            region: inside(vec![at], vec![self.len]),
            skipped,
            strides: vec![self.stride],
        };
        starts.into_iter().map(segment).collect()
    }
}

/// The tiles that have one segment a public dim.
fn product(local_offset: u64, sides: impl Iterator<Item = Vec<Segment>>) -> Vec<Tile> {
    let nothing = Tile {
        global: Region::whole(&[]),
        local_offset,
        local_strides: Vec::new(),
    };
    sides.fold(vec![nothing], |tiles, side| {
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
