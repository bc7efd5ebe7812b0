//! How one tensor is partitioned over a mesh, and the tiles that each rank holds.
//!
//! The constructor checks a layout, so that the tiles of every rank can be computed without errors. There are four
//! groups of mesh axes: axes that split a dim, axes that split the flattened block (`flat`), axes with a fixed
//! coordinate (`place`), and the remaining axes, along which ranks are replicas. The tiles at all coordinates of the
//! first two groups cover the tensor by construction.
//!
//! Along a dim a part is a list of segments of the global extent, which are contiguous in the local extent: one segment
//! for a plain dim, one segment per block for a fused dim. The block of a rank is the product of its segments over the
//! dims; its tiles are the boxes of that product. `flat` selects a range of the flattened block, which is again a few
//! boxes.

use crate::error::{Error, Kind, Result};
use crate::geometry::dtype::n_elements;
use crate::geometry::mesh::{Mesh, Place};
use crate::geometry::region::{Dims, Region, flat_range_boxes, row_major_strides};
use crate::geometry::tile::Tile;
use smallvec::SmallVec;
use std::sync::Arc;

/// Most blocks of a tensor, multiplied over its dims. A rank can have one tile per block.
const MAX_BLOCKS: u64 = 1 << 16;

/// The rule for an extent that is not divisible by the number of parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uneven {
    /// An error.
    Refuse,
    /// Chunks of the rounded-up quotient, axis by axis, as `torch.chunk` does; trailing parts may be empty.
    Ceil,
}

/// One block of a fused dim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Extent of the block.
    pub size: u64,
    /// Whether it is split; every part holds all of a block that is not split.
    pub is_cut: bool,
}

impl Block {
    /// `n` partitioned blocks of equal size.
    ///
    /// # Errors
    ///
    /// [`Kind::Layout`] if the extent is no multiple of `n`, or `n` is too large.
    pub fn equal(extent: u64, n: u64) -> Result<Vec<Self>> {
        if n == 0 || n > MAX_BLOCKS || !extent.is_multiple_of(n) {
            let message = format!(
                "{} cannot be divided into {n} equal blocks",
                elements(extent)
            );
            return Err(Error::new(Kind::Layout, message));
        }
        let block = Self {
            size: extent / n,
            is_cut: true,
        };
        Ok(vec![block; n as usize])
    }
}

/// A number of elements, in words.
fn elements(n: u64) -> String {
    format!("{n} element{}", if n == 1 { "" } else { "s" })
}

/// How one dim is partitioned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DimPartition {
    /// The axes that split it, outermost first.
    pub axes: Vec<usize>,
    /// Explicit sizes of the parts.
    pub sizes: Option<Vec<u64>>,
    /// Blocks that are each split separately.
    pub blocks: Option<Vec<Block>>,
}

/// How a tensor is divided over the axes of a mesh; see the fields of a rule in a layout file.
#[derive(Debug, Clone)]
pub struct Partition {
    /// One entry per dim.
    pub dims: Vec<DimPartition>,
    /// Rule for extents that are not divisible.
    pub uneven: Uneven,
    /// Axes that split the flattened block.
    pub flat: Option<Vec<usize>>,
    /// `stored[j]` is the global dim at storage position `j`.
    pub stored: Option<Vec<usize>>,
}

/// How one tensor is partitioned over a mesh.
#[derive(Debug)]
pub struct Layout {
    mesh: Arc<Mesh>,
    shape: Vec<u64>,
    dims: Vec<DimCut>,
    flat: Option<Vec<usize>>,
    order: Vec<usize>,
    /// For each axis the coordinate that `place` fixes, if any.
    fixed: Vec<Option<u64>>,
}

/// Partition of one dim.
#[derive(Debug)]
pub(crate) struct DimCut {
    pub(crate) axes: Vec<usize>,
    pub(crate) cuts: Cuts,
}

/// Boundaries of the parts of a dim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Cuts {
    /// Parts of one size.
    Even { extent: u64, n_parts: u64 },
    /// Chunks of `torch.chunk`, axis by axis: each axis of so many parts splits the chunks of the previous one.
    Ceil {
        extent: u64,
        sizes: SmallVec<[u64; 2]>,
    },
    /// Part `k` is `bounds[k]..bounds[k + 1]`.
    Listed(Vec<u64>),
    /// For each block its start and the bounds of its parts. A block with one part is complete in every part of the
    /// dim.
    Blocks(Vec<(u64, Self)>, u64),
}

impl Cuts {
    /// The parts with these bounds, which begin with 0 and grow.
    pub(crate) fn of(bounds: Vec<u64>) -> Self {
        let n_parts = bounds.len() as u64 - 1;
        let extent = bounds[bounds.len() - 1];
        let part = bounds.get(1).copied().unwrap_or_default();
        if n_parts > 0 && bounds.windows(2).all(|pair| pair[1] - pair[0] == part) {
            return Self::Even { extent, n_parts };
        }
        Self::Listed(bounds)
    }

    pub(crate) fn n_parts(&self) -> u64 {
        match self {
            Self::Even { n_parts, .. } | Self::Blocks(_, n_parts) => *n_parts,
            Self::Ceil { sizes, .. } => sizes.iter().product(),
            Self::Listed(bounds) => bounds.len() as u64 - 1,
        }
    }

    /// Range of a part of a dim without blocks.
    pub(crate) fn part(&self, part: u64) -> (u64, u64) {
        match self {
            Self::Even { extent, n_parts } => {
                (part * (extent / n_parts), (part + 1) * (extent / n_parts))
            }
            Self::Ceil { extent, sizes } => {
                let (mut chunk, mut rest, mut n_below) = ((0, *extent), part, self.n_parts());
                for &size in sizes {
                    n_below /= size;
                    chunk = ceil_chunk(chunk, size, rest / n_below);
                    rest %= n_below;
                }
                chunk
            }
            Self::Listed(bounds) => (bounds[part as usize], bounds[part as usize + 1]),
            Self::Blocks(..) => unreachable!("a dim with blocks has segments"),
        }
    }

    /// The parts of a dim without blocks that overlap `start..end`, which is not empty.
    pub(crate) fn parts_over(&self, start: u64, end: u64) -> std::ops::Range<u64> {
        match self {
            Self::Even { extent, n_parts } => {
                let size = extent / n_parts;
                start / size..(end - 1) / size + 1
            }
            Self::Ceil { extent, sizes } => {
                let part_of = |at: u64| {
                    let (mut chunk, mut part) = ((0, *extent), 0);
                    for &size in sizes {
                        let number = (at - chunk.0) / (chunk.1 - chunk.0).div_ceil(size);
                        chunk = ceil_chunk(chunk, size, number);
                        part = part * size + number;
                    }
                    part
                };
                part_of(start)..part_of(end - 1) + 1
            }
            Self::Listed(bounds) => {
                let first = bounds.partition_point(|b| *b <= start) - 1;
                let last = bounds.partition_point(|b| *b < end) - 1;
                first as u64..last as u64 + 1
            }
            Self::Blocks(..) => unreachable!("a dim with blocks has segments"),
        }
    }

    /// The elements that the parts divide.
    pub(crate) fn extent(&self) -> u64 {
        match self {
            Self::Even { extent, .. } | Self::Ceil { extent, .. } => *extent,
            Self::Listed(bounds) => bounds[bounds.len() - 1],
            Self::Blocks(blocks, _) => blocks.iter().map(|(_, cuts)| cuts.extent()).sum(),
        }
    }

    /// Whether the parts cover a dim without gaps.
    pub(crate) fn covers(&self, extent: u64) -> bool {
        self.extent() == extent
            && match self {
                Self::Even { n_parts, .. } => extent.is_multiple_of(*n_parts),
                Self::Ceil { .. } => true,
                Self::Listed(bounds) => bounds[0] == 0 && bounds.is_sorted(),
                Self::Blocks(blocks, _) => {
                    let mut end = 0;
                    blocks.iter().all(|(start, cuts)| {
                        let n = cuts.extent();
                        let is_next = *start == end;
                        end = start + n;
                        is_next && cuts.covers(n)
                    })
                }
            }
    }

    /// Whether all parts have as many elements.
    fn is_even(&self) -> bool {
        match self {
            Self::Even { .. } => true,
            Self::Ceil { .. } | Self::Listed(_) => false,
            Self::Blocks(blocks, _) => blocks.iter().all(|(_, cuts)| cuts.is_even()),
        }
    }

    /// `(global start, extent)` of the nonempty segments of a part, in local order.
    fn segments(&self, part: u64) -> Vec<(u64, u64)> {
        let segment = |(start, end): (u64, u64), base: u64| {
            (end > start).then_some((base + start, end - start))
        };
        match self {
            Self::Even { .. } | Self::Ceil { .. } | Self::Listed(_) => {
                segment(self.part(part), 0).into_iter().collect()
            }
            Self::Blocks(blocks, _) => blocks
                .iter()
                .filter_map(|(base, cuts)| {
                    segment(cuts.part(if cuts.n_parts() == 1 { 0 } else { part }), *base)
                })
                .collect(),
        }
    }
}

/// Position of a flattened block in a joint buffer, and the size of each part of the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlatSpan {
    /// Element of the joint buffer at which the block begins.
    pub start: u64,
    /// Elements of one part.
    pub part_len: u64,
}

impl Layout {
    /// Checks a partition against the mesh and the global shape.
    ///
    /// # Errors
    ///
    /// [`Kind::Layout`] if the partition does not fit the shape, an axis is used twice, or no rank holds the tensor.
    pub fn new(
        mesh: Arc<Mesh>,
        shape: Vec<u64>,
        partition: Partition,
        place: &[Place],
    ) -> Result<Self> {
        let Partition {
            dims: partitions,
            uneven,
            flat,
            stored,
        } = partition;
        let n = shape.len();
        if n_elements(&shape).is_none_or(|n| n > i64::MAX as u64) {
            return Err(Error::new(
                Kind::Layout,
                format!("shape {} is too large", Dims(&shape)),
            ));
        }
        if partitions.len() != n {
            return Err(Error::new(
                Kind::Layout,
                format!(
                    "the partition has {} dims, the tensor has {n}",
                    partitions.len()
                ),
            ));
        }
        let mut used = vec![false; mesh.axes().len()];
        for &axis in partitions
            .iter()
            .flat_map(|dim| &dim.axes)
            .chain(flat.iter().flatten())
        {
            if std::mem::replace(&mut used[axis], true) {
                return Err(Error::new(
                    Kind::Layout,
                    format!("axis `{}` is used twice", mesh.axes()[axis].0),
                ));
            }
        }
        let n_blocks = partitions
            .iter()
            .filter_map(|dim| dim.blocks.as_ref())
            .try_fold(1_u64, |n, blocks| n.checked_mul(blocks.len().max(1) as u64));
        if n_blocks.is_none_or(|n| n > MAX_BLOCKS) {
            return Err(Error::new(
                Kind::Layout,
                format!("`blocks` split the tensor into more than {MAX_BLOCKS} blocks"),
            ));
        }
        let dims = partitions
            .into_iter()
            .enumerate()
            .map(|(d, dim)| {
                DimCut::new(&mesh, dim, shape[d], uneven)
                    .map_err(|e| e.within(format_args!("dim {d}")))
            })
            .collect::<Result<Vec<_>>>()?;
        let order = stored.unwrap_or_else(|| (0..n).collect());
        let mut seen = vec![false; n];
        if order.len() != n
            || order
                .iter()
                .any(|&d| d >= n || std::mem::replace(&mut seen[d], true))
        {
            let message = format!("`stored` {order:?} is not a permutation of the {n} dims");
            return Err(Error::new(Kind::Layout, message));
        }
        let fixed = mesh.fixed(place)?;
        for (axis, (name, size)) in mesh.axes().iter().enumerate() {
            if fixed[axis].is_some() && used[axis] && *size > 1 {
                let message = format!(
                    "axis `{name}` both divides the tensor and places it: parts of it would be on no rank"
                );
                return Err(Error::new(Kind::Layout, message));
            }
        }
        Ok(Self {
            mesh,
            shape,
            dims,
            flat,
            order,
            fixed,
        })
    }

    /// The mesh.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// The global shape.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// `order()[j]` is the global dim at storage position `j`.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    pub(crate) fn dims(&self) -> &[DimCut] {
        &self.dims
    }

    /// Axes that split the flattened block.
    pub fn flat_axes(&self) -> Option<&[usize]> {
        self.flat.as_deref()
    }

    /// Whether every holder has one region of a regular grid.
    pub fn is_grid(&self) -> bool {
        self.flat.is_none()
            && self
                .dims
                .iter()
                .all(|dim| !matches!(dim.cuts, Cuts::Blocks(..)))
    }

    /// Whether arrays are stored in the order of the dims.
    fn is_in_order(&self) -> bool {
        self.order.iter().enumerate().all(|(j, &d)| j == d)
    }

    /// Whether a rank that holds a part holds the tensor as it is.
    pub(crate) fn is_whole(&self) -> bool {
        let is_whole = |(dim, extent): (&DimCut, &u64)| match &dim.cuts {
            Cuts::Even {
                extent: of,
                n_parts,
            } => of == extent && *n_parts == 1,
            Cuts::Ceil { .. } | Cuts::Listed(_) | Cuts::Blocks(..) => false,
        };
        self.flat.is_none()
            && self.is_in_order()
            && self.dims.iter().zip(self.shape()).all(is_whole)
    }

    /// Whether the rank at a position holds a part.
    pub fn holds(&self, position: u64) -> bool {
        self.mesh.is_at(position, &self.fixed)
    }

    /// The positions that hold a part, in mesh order.
    pub fn holders(&self) -> impl Iterator<Item = u64> {
        (0..self.mesh.n_points()).filter(|&position| self.holds(position))
    }

    /// One position for every distinct part, in mesh order; [`Self::replicas`] returns the others.
    pub fn distinct(&self) -> impl Iterator<Item = u64> {
        let free = self.free_axes();
        self.holders()
            .filter(move |&p| free.iter().all(|&axis| self.mesh.coordinate(p, axis) == 0))
    }

    /// All positions that hold the same part as this one, itself included, in mesh order.
    pub fn replicas(&self, position: u64) -> impl Iterator<Item = u64> {
        let free = self.free_axes();
        let base = free.iter().fold(position, |p, &axis| {
            p - self.mesh.coordinate(p, axis) * self.mesh.stride(axis)
        });
        (0..self.mesh.n_folded(&free)).map(move |k| base + self.mesh.unfold(k, &free))
    }

    /// Axes along which ranks are replicas.
    pub(crate) fn free_axes(&self) -> Vec<usize> {
        let cut = |axis: usize| {
            self.dims.iter().any(|dim| dim.axes.contains(&axis))
                || self.flat.iter().flatten().any(|&a| a == axis)
        };
        (0..self.mesh.axes().len())
            .filter(|&axis| self.fixed[axis].is_none() && !cut(axis))
            .collect()
    }

    /// Axes on whose coordinates it depends whether a rank holds a part, and how many elements its block has.
    pub(crate) fn shaping_axes(&self) -> impl Iterator<Item = usize> {
        let fixed = self.fixed.iter().enumerate();
        let fixed = fixed.filter_map(|(axis, at)| at.map(|_| axis));
        let uneven = self.dims.iter().filter(|dim| !dim.cuts.is_even());
        fixed.chain(uneven.flat_map(|dim| dim.axes.iter().copied()))
    }

    /// The part of the position that the axes in `place` determine.
    pub(crate) fn fixed_position(&self) -> u64 {
        self.fixed
            .iter()
            .enumerate()
            .map(|(axis, at)| at.unwrap_or(0) * self.mesh.stride(axis))
            .sum()
    }

    /// Shape of the block after `cut`, in storage order.
    pub fn block_shape(&self, position: u64) -> Vec<u64> {
        let extents = self.dims.iter().map(|dim| dim.extent(&self.mesh, position));
        let extents: Vec<u64> = extents.collect();
        if self.is_in_order() {
            return extents;
        }
        self.order.iter().map(|&d| extents[d]).collect()
    }

    /// Elements of the block after `cut`.
    pub fn block_len(&self, position: u64) -> u64 {
        let extents = self.dims.iter().map(|dim| dim.extent(&self.mesh, position));
        extents.product()
    }

    /// The span of a block that is alone in its flattened buffer, padded to a multiple of the number of parts.
    pub fn own_span(&self, position: u64) -> FlatSpan {
        let n = self.block_len(position);
        let parts = self
            .flat
            .as_ref()
            .map_or(1, |axes| self.mesh.n_folded(axes));
        FlatSpan {
            start: 0,
            part_len: n.div_ceil(parts),
        }
    }

    /// Shape of the array of a rank, in storage order; one dim with padding if flat.
    pub fn local_shape(&self, position: u64) -> Vec<u64> {
        match self.flat {
            None => self.block_shape(position),
            Some(_) => vec![self.own_span(position).part_len],
        }
    }

    /// The tiles of a rank.
    pub fn tiles(&self, position: u64) -> Vec<Tile> {
        self.tiles_in(position, self.own_span(position))
    }

    /// The tiles of a rank whose flattened block is part of a joint buffer. Without `flat` the span is ignored.
    pub fn tiles_in(&self, position: u64, span: FlatSpan) -> Vec<Tile> {
        if !self.holds(position) {
            return Vec::new();
        }
        if let Some(tile) = self.only_tile(position) {
            return vec![tile];
        }
        self.all_tiles(position, span)
    }

    /// The tile of a rank of a plain layout, which holds one box. As [`Self::all_tiles`], which makes a dozen lists for
    /// each of 100,000 arrays.
    fn only_tile(&self, position: u64) -> Option<Tile> {
        let global = self.only_box(position)?;
        let local_strides = row_major_strides(global.shape());
        Some(Tile {
            global,
            local_offset: 0,
            local_strides,
        })
    }

    /// The box of a rank that holds a part, where that is one box in the order of the dims, and not empty.
    pub(crate) fn only_box(&self, position: u64) -> Option<Region> {
        if self.flat.is_some() || !self.is_grid() || !self.is_in_order() {
            return None;
        }
        let n = self.dims.len();
        let (mut offset, mut shape) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for dim in &self.dims {
            let (start, end) = dim.cuts.part(self.mesh.fold(position, &dim.axes));
            if start == end {
                return None;
            }
            offset.push(start);
            shape.push(end - start);
        }
        Some(Region::new(offset, shape).expect("inside a tensor whose size fits"))
    }

    fn all_tiles(&self, position: u64, span: FlatSpan) -> Vec<Tile> {
        let segments: Vec<_> = self
            .dims
            .iter()
            .map(|dim| dim.segments(&self.mesh, position))
            .collect();
        let extents: Vec<u64> = segments
            .iter()
            .map(|s| s.iter().map(|(_, len)| len).sum())
            .collect();
        let block: Vec<u64> = self.order.iter().map(|&d| extents[d]).collect();
        let stored_strides = row_major_strides(&block);
        let mut strides = vec![0; block.len()];
        for (j, &d) in self.order.iter().enumerate() {
            strides[d] = stored_strides[j];
        }
        let n: u64 = block.iter().product();
        let (boxes, origin) = match &self.flat {
            None => (
                if n == 0 {
                    Vec::new()
                } else {
                    vec![Region::whole(&block)]
                },
                (0, 0),
            ),
            Some(axes) => {
                let first = self.mesh.fold(position, axes) * span.part_len;
                let start = first.saturating_sub(span.start).min(n);
                let end = (first + span.part_len).saturating_sub(span.start).min(n);
                (flat_range_boxes(&block, start, end), (span.start, first))
            }
        };
        let mut tiles = Vec::new();
        for stored in &boxes {
            let mut local = (vec![0; block.len()], vec![0; block.len()]);
            for (j, &d) in self.order.iter().enumerate() {
                local.0[d] = stored.offset()[j];
                local.1[d] = stored.shape()[j];
            }
            push_tiles(&segments, &local.0, &local.1, &strides, origin, &mut tiles);
        }
        tiles
    }
}

/// Splits a box of the block (global dim order) along the segments and pushes a tile for each part.
fn push_tiles(
    segments: &[Vec<(u64, u64)>],
    offset: &[u64],
    shape: &[u64],
    strides: &[u64],
    (add, subtract): (u64, u64),
    tiles: &mut Vec<Tile>,
) {
    let n = segments.len();
    // For each dim the parts (global start, local start, extent) of the box.
    let mut pieces: Vec<Vec<(u64, u64, u64)>> = Vec::with_capacity(n);
    for d in 0..n {
        let (mut local, mut found) = (0, Vec::new());
        for &(global, len) in &segments[d] {
            let start = local.max(offset[d]);
            let end = (local + len).min(offset[d] + shape[d]);
            if start < end {
                found.push((global + start - local, start, end - start));
            }
            local += len;
        }
        pieces.push(found);
    }
    let n_tiles: usize = pieces.iter().map(Vec::len).product();
    for mut k in 0..n_tiles {
        let mut tile = (vec![0; n], vec![0; n]);
        let mut local_offset = add;
        for d in (0..n).rev() {
            let (global, local, len) = pieces[d][k % pieces[d].len()];
            k /= pieces[d].len();
            tile.0[d] = global;
            tile.1[d] = len;
            local_offset += local * strides[d];
        }
        let global = Region::new(tile.0, tile.1).expect("inside a tensor whose size fits");
        tiles.push(Tile {
            global,
            local_offset: local_offset - subtract,
            local_strides: strides.to_vec(),
        });
    }
}

impl DimCut {
    fn new(mesh: &Mesh, dim: DimPartition, extent: u64, uneven: Uneven) -> Result<Self> {
        let DimPartition {
            axes,
            sizes,
            blocks,
        } = dim;
        let n_parts = mesh.n_folded(&axes);
        let plain = |extent: u64, what: &str| -> Result<Cuts> {
            if n_parts == 1 || extent.is_multiple_of(n_parts) && extent > 0 {
                return Ok(Cuts::Even { extent, n_parts });
            }
            match uneven {
                Uneven::Refuse if extent > 0 => {
                    let names: Vec<_> = axes
                        .iter()
                        .map(|&a| format!("{} ({})", mesh.axes()[a].0, mesh.size(a)))
                        .collect();
                    let message = format!(
                        "{what}{} cannot be divided into {n_parts} parts over {}",
                        elements(extent),
                        names.join(" x ")
                    );
                    Err(Error::new(Kind::Layout, message).hint(
                        "set `uneven: ceil` for chunks as of torch.chunk, or `sizes` for explicit parts",
                    ))
                }
                Uneven::Refuse | Uneven::Ceil => Ok(Cuts::Ceil {
                    extent,
                    sizes: axes.iter().map(|&axis| mesh.size(axis)).collect(),
                }),
            }
        };
        let cuts = match (sizes, blocks) {
            (None, None) => plain(extent, "")?,
            (Some(_), Some(_)) => {
                return Err(Error::new(
                    Kind::Layout,
                    "`sizes` and `blocks` are mutually exclusive",
                ));
            }
            (Some(sizes), None) => {
                let total = sizes
                    .iter()
                    .try_fold(0_u64, |sum, size| sum.checked_add(*size));
                if sizes.len() as u64 != n_parts || total != Some(extent) {
                    let message = format!(
                        "`sizes` lists {} parts with {} elements in total; expected {n_parts} parts with {extent} elements",
                        sizes.len(),
                        total.map_or_else(|| "too many".to_owned(), |n| n.to_string()),
                    );
                    return Err(Error::new(Kind::Layout, message));
                }
                let mut bounds = vec![0];
                bounds.extend(sizes.iter().scan(0, |end, size| {
                    *end += size;
                    Some(*end)
                }));
                Cuts::Listed(bounds)
            }
            (None, Some(blocks)) => {
                let total = blocks
                    .iter()
                    .try_fold(0_u64, |sum, block| sum.checked_add(block.size));
                if total != Some(extent) {
                    let sizes: Vec<_> = blocks.iter().map(|block| block.size).collect();
                    let message = format!(
                        "the sum of `blocks` {sizes:?} is not the {extent} elements of the dim"
                    );
                    return Err(Error::new(Kind::Layout, message));
                }
                let mut start = 0;
                let mut cuts = Vec::with_capacity(blocks.len());
                for block in &blocks {
                    let whole = Cuts::Even {
                        extent: block.size,
                        n_parts: 1,
                    };
                    cuts.push((
                        start,
                        if block.is_cut {
                            plain(block.size, "a block of ")?
                        } else {
                            whole
                        },
                    ));
                    start += block.size;
                }
                Cuts::Blocks(cuts, n_parts)
            }
        };
        Ok(Self { axes, cuts })
    }

    /// Extent of the part of a position.
    fn extent(&self, mesh: &Mesh, position: u64) -> u64 {
        if let Cuts::Blocks(..) = self.cuts {
            let segments = self.segments(mesh, position);
            return segments.iter().map(|(_, len)| len).sum();
        }
        let (start, end) = self.cuts.part(mesh.fold(position, &self.axes));
        end - start
    }

    fn segments(&self, mesh: &Mesh, position: u64) -> Vec<(u64, u64)> {
        self.cuts.segments(mesh.fold(position, &self.axes))
    }
}

/// A chunk of a chunk that `torch.chunk` divides into so many.
fn ceil_chunk((start, end): (u64, u64), size: u64, number: u64) -> (u64, u64) {
    let n = (end - start).div_ceil(size);
    let at = |number: u64| (start + number * n).min(end);
    (at(number), at(number + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(shape: &[u64], cut: &[&[usize]], uneven: Uneven, flat: Option<Vec<usize>>) -> Layout {
        let mesh = Arc::new(Mesh::new(vec![("dp".into(), 2), ("tp".into(), 3)], None).unwrap());
        let dims = cut
            .iter()
            .map(|axes| DimPartition {
                axes: axes.to_vec(),
                ..DimPartition::default()
            })
            .collect();
        let partition = Partition {
            dims,
            uneven,
            flat,
            stored: None,
        };
        Layout::new(mesh, shape.to_vec(), partition, &[]).unwrap()
    }

    #[test]
    fn torch_chunks_nest() {
        // torch.chunk(10, 2) = 5, 5; each torch.chunk(5, 3) = 2, 2, 1.
        let layout = layout(&[10], &[&[0, 1]], Uneven::Ceil, None);
        let parts: Vec<_> = (0..6).map(|p| layout.tiles(p)[0].global.clone()).collect();
        let expected: Vec<_> = [(0, 2), (2, 2), (4, 1), (5, 2), (7, 2), (9, 1)]
            .map(|(o, s)| Region::new(vec![o], vec![s]).unwrap())
            .into();
        assert_eq!(parts, expected);
    }

    #[test]
    fn chunks_are_found_as_they_are_listed() {
        for sizes in [vec![5], vec![2, 3], vec![3, 2], vec![1, 4], vec![2, 2, 3]] {
            for extent in 0..40 {
                let mut bounds: Vec<u64> = vec![0, extent];
                for &size in &sizes {
                    let mut finer = vec![0];
                    for pair in bounds.windows(2) {
                        let chunk: u64 = (pair[1] - pair[0]).div_ceil(size);
                        finer.extend((1..=size).map(|k| (pair[0] + k * chunk).min(pair[1])));
                    }
                    bounds = finer;
                }
                let listed = Cuts::Listed(bounds);
                let sizes = sizes.iter().copied().collect();
                let found = Cuts::Ceil { extent, sizes };
                assert_eq!(found.n_parts(), listed.n_parts());
                for part in 0..listed.n_parts() {
                    assert_eq!(found.part(part), listed.part(part), "{found:?} {part}");
                }
                for (start, end) in (0..extent).flat_map(|s| (s + 1..=extent).map(move |e| (s, e)))
                {
                    let (one, other) =
                        (found.parts_over(start, end), listed.parts_over(start, end));
                    assert_eq!(one, other, "{found:?} {start} {end}");
                }
            }
        }
    }

    #[test]
    fn the_only_tile_is_found_as_all_tiles_are() {
        let cuts: [&[&[usize]]; 4] = [
            &[&[0], &[1]],
            &[&[1, 0], &[]],
            &[&[], &[1]],
            &[&[], &[0, 1]],
        ];
        let mut n_found = 0;
        for (shape, cut) in [[6, 9], [7, 4], [12, 6], [1, 1]]
            .iter()
            .flat_map(|shape| cuts.iter().map(move |cut| (shape, cut)))
        {
            let layout = layout(shape, cut, Uneven::Ceil, None);
            for position in 0..6 {
                let all = layout.all_tiles(position, layout.own_span(position));
                if let Some(tile) = layout.only_tile(position) {
                    n_found += 1;
                    assert_eq!(all, [tile]);
                } else {
                    assert!(all.is_empty(), "{shape:?} {cut:?} {position}");
                }
            }
        }
        assert!(n_found > 60, "{n_found}");
    }

    #[test]
    fn flat_parts_are_padded() {
        let layout = layout(&[2, 5], &[&[], &[]], Uneven::Refuse, Some(vec![1]));
        assert_eq!(layout.local_shape(0), [4]);
        let last = layout.tiles(2);
        assert_eq!(last.len(), 1);
        assert_eq!(
            (last[0].global.offset(), last[0].global.shape()),
            (&[1, 3][..], &[1, 2][..])
        );
        assert_eq!(last[0].local_offset, 0);
    }
}
