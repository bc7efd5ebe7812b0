//! Tensors of which the ranks of a mesh hold flat parts, or parts of blocks, each rank in its file.
//!
//! Nothing is listed for a rank. Which ranks hold an element, and where, is computed: the parts of the dims give the
//! block, its place in the flattened block gives the part of the buffer. So a tensor is an address of its layout and of
//! its files, and a request costs as much as it has copies.

use crate::error::Result;
use crate::geometry::joined::Joined;
use crate::geometry::layout::{Cuts, FlatSpan, Layout};
use crate::geometry::region::{Region, element_of, flat_range_boxes, row_major_strides};
use crate::geometry::tile::Tile;
use std::collections::HashMap;
use std::sync::Arc;

/// A tensor by its layout, and the file of each position.
#[derive(Debug, Clone)]
pub(crate) struct Divided {
    layout: Arc<Layout>,
    files: Arc<[u32]>,
    /// The array of which it is a part, and its number there.
    joined: Option<(Arc<Joined>, u32)>,
}

/// A region that a stored array holds.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) region: Region,
    /// The region in the stored array.
    pub(crate) source: Tile,
    /// The shape of the stored array.
    pub(crate) shape: Vec<u64>,
    /// The files that hold it, at most as many as were requested.
    pub(crate) files: Vec<u32>,
}

/// Elements of a dim that one part holds, one after the other.
#[derive(Debug, Clone, Copy)]
struct Side {
    start: u64,
    len: u64,
    part: u64,
    /// Where they begin in the part, and the elements of the part.
    local: u64,
    extent: u64,
}

/// The coordinates of an array that is stored for a tensor.
pub(crate) type Place = (u64, FlatSpan);

impl Divided {
    pub(crate) fn alone(layout: &Arc<Layout>, files: &Arc<[u32]>) -> Self {
        Self {
            layout: Arc::clone(layout),
            files: Arc::clone(files),
            joined: None,
        }
    }

    pub(crate) fn joined(joined: &Arc<Joined>, number: u32, files: &Arc<[u32]>) -> Self {
        Self {
            layout: Arc::clone(&joined.keys()[number as usize].1),
            files: Arc::clone(files),
            joined: Some((Arc::clone(joined), number)),
        }
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    pub(crate) fn files(&self) -> &Arc<[u32]> {
        &self.files
    }

    /// The array of which it is a part.
    pub(crate) fn joint(&self) -> Option<&Arc<Joined>> {
        self.joined.as_ref().map(|(joined, _)| joined)
    }

    /// The stored name of its arrays.
    pub(crate) fn name<'a>(&'a self, key: &'a str) -> &'a str {
        self.joint().map_or(key, |joined| joined.name())
    }

    /// The shape of the array at a place.
    pub(crate) fn shape(&self, (position, span): Place) -> Vec<u64> {
        match self.layout.flat_axes() {
            None => self.layout.block_shape(position),
            Some(_) => vec![span.part_len],
        }
    }

    /// Whether the parts of the dims cover a shape. The parts of a buffer cover it: they are equal, and the last one
    /// ends where it ends or behind it.
    pub(crate) fn covers(&self, shape: &[u64]) -> bool {
        let dims = self.layout.dims().iter();
        self.layout.dims().len() == shape.len()
            && dims.zip(shape).all(|(dim, &n)| dim.cuts.covers(n))
    }

    fn span(&self, position: u64) -> Result<FlatSpan> {
        match &self.joined {
            None => Ok(self.layout.own_span(position)),
            Some((joined, number)) => {
                let span = joined.buffer(position)?.span(*number);
                Ok(span.expect("a rank that holds a tensor has its block"))
            }
        }
    }

    /// Where arrays of it are stored: of a joined tensor those with elements, and one if it has none.
    pub(crate) fn places(&self) -> Result<Vec<Place>> {
        if self.joined.is_none() {
            let holders = self.layout.holders();
            return holders.map(|at| Ok((at, self.span(at)?))).collect();
        }
        let mesh = self.layout.mesh();
        let flat = self.layout.flat_axes().expect("joined tensors are flat");
        let others: Vec<usize> = (0..mesh.axes().len())
            .filter(|axis| !flat.contains(axis))
            .collect();
        let bases = (0..mesh.n_folded(&others)).map(|k| mesh.unfold(k, &others));
        let mut places = Vec::new();
        for base in bases.filter(|&base| self.layout.holds(base)) {
            let (span, n) = (self.span(base)?, self.layout.block_len(base));
            if n > 0 {
                let parts = span.start / span.part_len..=(span.start + n - 1) / span.part_len;
                places.extend(parts.map(|part| (base + mesh.unfold(part, flat), span)));
            }
        }
        if places.is_empty() {
            let holder = self.layout.holders().next();
            places.extend(
                holder
                    .map(|at| self.span(at).map(|span| (at, span)))
                    .transpose()?,
            );
        }
        places.sort_unstable_by_key(|place| place.0);
        Ok(places)
    }

    /// The file and the shape of each stored array; of a joined tensor also those without elements of it.
    pub(crate) fn arrays(&self) -> Result<Vec<(u32, Vec<u64>)>> {
        let file = |position: u64| self.files[position as usize];
        let Some(joined) = self.joint() else {
            let holders = self.layout.holders();
            let array = |position| (file(position), self.layout.local_shape(position));
            return Ok(holders.map(array).collect());
        };
        let mut arrays = Vec::new();
        for position in 0..self.layout.mesh().n_points() {
            let buffer = joined.buffer(position)?;
            if !buffer.is_empty() {
                arrays.push((file(position), vec![buffer.part_len]));
            }
        }
        Ok(arrays)
    }

    /// The file of a place.
    pub(crate) fn file(&self, place: Place) -> u32 {
        self.files[place.0 as usize]
    }

    /// The tiles of the array at a place.
    pub(crate) fn tiles(&self, (position, span): Place) -> Vec<Tile> {
        self.layout.tiles_in(position, span)
    }

    /// Calls a function with the regions that arrays hold of a requested one, which is not empty: each element once.
    ///
    /// # Errors
    /// A buffer is too long.
    pub(crate) fn each_over(
        &self,
        key: &str,
        requested: &Region,
        max_files: u64,
        mut each: impl FnMut(Held),
    ) -> Result<()> {
        // All parts hold a block that is not split. Tensors read it from different ones.
        let turn = key.bytes().map(u64::from).sum();
        let sides = self.layout.dims().iter().enumerate();
        let sides: Vec<Vec<Side>> = sides
            .map(|(d, dim)| sides_over(&dim.cuts, requested.offset()[d], requested.end(d), turn))
            .collect();
        let replicas = self.replicas();
        let mut at = vec![0; sides.len()];
        if sides.iter().any(Vec::is_empty) {
            return Ok(());
        }
        loop {
            let own: Vec<Side> = at.iter().zip(&sides).map(|(&i, sides)| sides[i]).collect();
            self.each_in_block(&own, (&replicas, max_files), &mut each)?;
            let Some(d) = (0..at.len()).rev().find(|&d| at[d] + 1 < sides[d].len()) else {
                return Ok(());
            };
            at[d] += 1;
            at[d + 1..].fill(0);
        }
    }

    /// The axes along which arrays are the same, with other tensors of the array, too.
    fn replicas(&self) -> Vec<usize> {
        let mut axes = self.layout.free_axes();
        if let Some(joined) = self.joint() {
            axes.retain(|axis| !joined.shaping().contains(axis));
        }
        axes
    }

    /// The regions of a box that lies in one block.
    fn each_in_block(
        &self,
        sides: &[Side],
        (replicas, max_files): (&[usize], u64),
        each: &mut impl FnMut(Held),
    ) -> Result<()> {
        let (layout, mesh) = (&self.layout, self.layout.mesh());
        let cut = layout.dims().iter().zip(sides);
        let base = layout.fixed_position()
            + cut
                .map(|(dim, side)| mesh.unfold(side.part, &dim.axes))
                .sum::<u64>();
        let n_replicas = mesh.n_folded(replicas);
        let n_files = n_replicas.min(max_files);
        // The sample begins at a different replica for each part, as in a grid.
        let files = |at: u64, turn: u64| {
            let first = turn % n_replicas;
            let replica =
                |k| mesh.unfold((k * n_replicas / n_files + first) % n_replicas, replicas);
            let files = (0..n_files).map(|k| self.files[(at + replica(k)) as usize]);
            files.collect::<Vec<_>>()
        };
        let turn = sides.iter().fold(0_u64, |turn, side| {
            turn.wrapping_mul(31).wrapping_add(side.part)
        });

        // In storage order: the block, and the box in it.
        let order = layout.order();
        let block: Vec<u64> = order.iter().map(|&d| sides[d].extent).collect();
        let storage = row_major_strides(&block);
        let in_block = |of: fn(&Side) -> u64| order.iter().map(|&d| of(&sides[d])).collect();
        let own = Region::new(in_block(|side| side.local), in_block(|side| side.len))?;
        let mut strides = vec![0; order.len()];
        for (j, &d) in order.iter().enumerate() {
            strides[d] = storage[j];
        }
        // A part of the box, in the dims of the tensor, in an array that begins at an element of the buffer.
        let held = |part: &Region, (start, from): (u64, u64), shape: Vec<u64>, files: Vec<u32>| {
            let (mut offset, mut extents) = (vec![0; order.len()], vec![0; order.len()]);
            for (j, &d) in order.iter().enumerate() {
                offset[d] = sides[d].start + (part.offset()[j] - sides[d].local);
                extents[d] = part.shape()[j];
            }
            let region = Region::new(offset, extents)?;
            let source = Tile {
                global: region.clone(),
                local_offset: start + element_of(part.offset(), &storage) - from,
                local_strides: strides.clone(),
            };
            Ok(Held {
                region,
                source,
                shape,
                files,
            })
        };

        let Some(flat) = layout.flat_axes() else {
            each(held(&own, (0, 0), block.clone(), files(base, turn))?);
            return Ok(());
        };
        let FlatSpan { start, part_len } = self.span(base)?;
        let n: u64 = block.iter().product();
        let mut next = Some(element_of(own.offset(), &storage));
        while let Some(at) = next {
            let part = (start + at) / part_len;
            let from = part * part_len;
            let end = (from + part_len - start).min(n);
            let position = base + mesh.unfold(part, flat);
            for range in flat_range_boxes(&block, from.saturating_sub(start), end) {
                if let Some(common) = own.intersect(&range) {
                    let files = files(position, turn.wrapping_add(part));
                    each(held(&common, (start, from), vec![part_len], files)?);
                }
            }
            next = (end < n).then(|| next_in(&own, &storage, end)).flatten();
        }
        Ok(())
    }
}

/// The elements of a range of a dim, which is not empty, by the parts that hold them.
fn sides_over(cuts: &Cuts, from: u64, to: u64, turn: u64) -> Vec<Side> {
    let Cuts::Blocks(blocks, n_parts) = cuts else {
        let side = |part| {
            let (first, end) = cuts.part(part);
            let start = from.max(first);
            Side {
                start,
                len: to.min(end).saturating_sub(start),
                part,
                local: start.saturating_sub(first),
                extent: end - first,
            }
        };
        let sides = cuts.parts_over(from, to).map(side);
        return sides.filter(|side| side.len > 0).collect();
    };
    // For each part where its segments begin in it, and its elements.
    let mut parts: HashMap<u64, (Vec<u64>, u64)> = HashMap::new();
    let segment = |cuts: &Cuts, part| cuts.part(if cuts.n_parts() == 1 { 0 } else { part });
    let mut locals = |part, block: usize| {
        let (starts, extent) = parts.entry(part).or_insert_with(|| {
            let mut end = 0;
            let starts = blocks.iter().map(|(_, cuts)| {
                let (first, last) = segment(cuts, part);
                let start = end;
                end += last - first;
                start
            });
            (starts.collect(), end)
        });
        (starts[block], *extent)
    };
    let mut sides = Vec::new();
    for (number, (base, cuts)) in blocks.iter().enumerate() {
        let start = from.max(*base) - base;
        let end = to.min(base + cuts.extent()).saturating_sub(*base);
        if start >= end {
            continue;
        }
        let over = if cuts.n_parts() == 1 {
            let part = turn % n_parts;
            part..part + 1
        } else {
            cuts.parts_over(start, end)
        };
        for part in over {
            let (first, last) = segment(cuts, part);
            let (begin, finish) = (start.max(first), end.min(last));
            if begin < finish {
                let (local, extent) = locals(part, number);
                sides.push(Side {
                    start: base + begin,
                    len: finish - begin,
                    part,
                    local: local + (begin - first),
                    extent,
                });
            }
        }
    }
    sides
}

/// The first element of a box from an element of the array on, in row-major order. `at` is an element of the array.
fn next_in(own: &Region, strides: &[u64], at: u64) -> Option<u64> {
    let mut rest = at;
    let mut index: Vec<u64> = strides
        .iter()
        .map(|stride| {
            let i = rest / stride;
            rest %= stride;
            i
        })
        .collect();
    for d in 0..index.len() {
        if index[d] < own.offset()[d] {
            index[d..].copy_from_slice(&own.offset()[d..]);
            break;
        }
        if index[d] >= own.end(d) {
            let before = (0..d)
                .rev()
                .find(|&before| index[before] + 1 < own.end(before))?;
            index[before] += 1;
            index[before + 1..].copy_from_slice(&own.offset()[before + 1..]);
            break;
        }
    }
    Some(element_of(&index, strides))
}
