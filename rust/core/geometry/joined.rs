//! Blocks of several tensors that lie one after the other in one flat buffer, which ranks divide equally.
//!
//! Where blocks begin is computed once for all ranks whose blocks have the same sizes. What the part of a rank holds is
//! then found by binary search, so that no rank looks at all tensors.

use crate::error::{Error, Kind, Printable, Result};
use crate::geometry::layout::{FlatSpan, Layout};
use crate::geometry::mesh::Mesh;
use crate::geometry::tile::Tile;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A tensor and its shape, if that is known.
pub(crate) type KeyAndShape = (String, Option<Vec<u64>>);

/// Most blocks whose starts are kept: some 150 MiB. Beyond it, they are computed again.
const MAX_KEPT: usize = 1 << 20;

/// Elements of a buffer. Sums and products of positions below it do not overflow.
const MAX_ELEMENTS: u64 = 1 << 62;

/// Tensors that are one flat array on each rank.
#[derive(Debug)]
pub struct Joined {
    name: String,
    keys: Vec<(String, Arc<Layout>)>,
    align: u64,
    mesh: Arc<Mesh>,
    axes: Vec<usize>,
    /// The axes on which it depends which blocks a buffer has, and of which sizes.
    shaping: Vec<usize>,
    kept: Mutex<Kept>,
}

/// Buffers by the coordinates on the shaping axes, as a position.
#[derive(Debug, Default)]
struct Kept {
    buffers: HashMap<u64, Arc<Buffer>>,
    n_blocks: usize,
}

/// Where the blocks of the tensors that some ranks hold lie in their buffer.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// In ascending order, also of the numbers of the tensors.
    blocks: Vec<Block>,
    /// The tensors, for the requests of all ranks.
    keys: OnceLock<Arc<[KeyAndShape]>>,
    /// Elements of the part of a rank.
    pub(crate) part_len: u64,
}

#[derive(Debug)]
struct Block {
    /// The number of the tensor.
    number: u32,
    start: u64,
    end: u64,
}

/// The part of a buffer that a rank holds.
#[derive(Debug, PartialEq, Eq)]
pub struct JoinedPart {
    /// Its elements.
    pub n: u64,
    /// Its tiles, each with the number of its tensor.
    pub tiles: Vec<(u32, Tile)>,
    /// The elements that are in no tile.
    pub padding: Vec<(u64, u64)>,
}

impl Joined {
    /// Joins tensors, which a rank need not all hold. Each start is rounded up to `align` elements, and the end to
    /// `align` elements for each part.
    ///
    /// # Errors
    /// There are no tensors, their layouts differ in `flat` or mesh, or `align` is 0.
    pub fn new(name: String, keys: Vec<(String, Arc<Layout>)>, align: u64) -> Result<Self> {
        let bad = |what: &str| fault(&name, what);
        let (_, first) = keys.first().ok_or_else(|| bad("it has no keys"))?;
        let axes = first
            .flat_axes()
            .ok_or_else(|| bad("the layouts of its keys have no `flat`"))?;
        if align == 0 {
            return Err(bad("`align` is 0; expected at least 1"));
        }
        let mut shaping = BTreeSet::new();
        let mut known: Option<&Arc<Layout>> = None;
        for (key, layout) in &keys {
            if known
                .replace(layout)
                .is_some_and(|last| Arc::ptr_eq(last, layout))
            {
                continue;
            }
            let is_alike = layout.flat_axes() == Some(axes) && layout.mesh() == first.mesh();
            if !is_alike {
                let what = format!("`{}` is partitioned over other axes", Printable(key));
                return Err(bad(&what));
            }
            shaping.extend(layout.shaping_axes());
        }
        let (mesh, axes) = (Arc::clone(first.mesh()), axes.to_vec());
        Ok(Self {
            name,
            keys,
            align,
            mesh,
            axes,
            shaping: shaping.into_iter().collect(),
            kept: Mutex::default(),
        })
    }

    /// The name of the array.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tensors, in the order of their blocks.
    pub fn keys(&self) -> &[(String, Arc<Layout>)] {
        &self.keys
    }

    /// The axes on which it depends which blocks a buffer has, and of which sizes.
    pub(crate) fn shaping(&self) -> &[usize] {
        &self.shaping
    }

    /// The mesh.
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// The tensors of which a position holds a part. Ranks that hold the same share the list.
    pub(crate) fn held_keys(&self, position: u64) -> Result<Arc<[KeyAndShape]>> {
        let buffer = self.buffer(position)?;
        let of_block = |block: &Block| {
            let (key, layout) = &self.keys[block.number as usize];
            (key.clone(), Some(layout.shape().to_vec()))
        };
        let keys = || buffer.blocks.iter().map(of_block).collect();
        Ok(Arc::clone(buffer.keys.get_or_init(keys)))
    }

    /// The part of the rank at a position. `None`: it holds none of the tensors.
    ///
    /// # Errors
    /// The buffer is too long.
    pub fn part(&self, position: u64) -> Result<Option<JoinedPart>> {
        let buffer = self.buffer(position)?;
        if buffer.is_empty() {
            return Ok(None);
        }
        let n = buffer.part_len;
        let own = self.own(position, n);
        let (mut tiles, mut padding, mut gap_from) = (Vec::new(), Vec::new(), own.start);
        let first = buffer
            .blocks
            .partition_point(|block| block.end <= own.start);
        let blocks = buffer.blocks[first..].iter();
        for block in blocks.take_while(|block| block.start < own.end) {
            if block.start == block.end {
                continue;
            }
            let (_, layout) = &self.keys[block.number as usize];
            let span = FlatSpan {
                start: block.start,
                part_len: n,
            };
            let of_key = layout.tiles_in(position, span).into_iter();
            tiles.extend(of_key.map(|tile| (block.number, tile)));
            if gap_from < block.start {
                padding.push((gap_from - own.start, block.start - own.start));
            }
            gap_from = block.end;
        }
        if gap_from < own.end {
            padding.push((gap_from - own.start, n));
        }
        Ok(Some(JoinedPart { n, tiles, padding }))
    }

    /// The part of a rank.
    ///
    /// # Errors
    /// The mesh has no such rank, the rank holds none of the tensors, or the buffer is too long.
    pub fn part_of(&self, rank: u64) -> Result<JoinedPart> {
        self.part(self.mesh.position(rank)?)?.ok_or_else(|| {
            let message = format!("rank {rank} holds no part of `{}`", Printable(&self.name));
            Error::new(Kind::Argument, message).key(&self.name)
        })
    }

    /// The positions that hold a part, those with equal parts together, in the order of the first ones.
    ///
    /// # Errors
    /// A buffer is too long.
    pub fn groups(&self, positions: impl IntoIterator<Item = u64>) -> Result<Vec<(u64, Vec<u64>)>> {
        let mut groups: Vec<(u64, Vec<u64>)> = Vec::new();
        let mut known: HashMap<(u64, Vec<(u32, Tile)>), usize> = HashMap::new();
        for position in positions {
            let Some(JoinedPart { n, tiles, .. }) = self.part(position)? else {
                continue;
            };
            let group = *known.entry((n, tiles)).or_insert_with(|| {
                groups.push((n, Vec::new()));
                groups.len() - 1
            });
            groups[group].1.push(position);
        }
        Ok(groups)
    }

    /// The elements of the buffer that the rank at a position holds.
    pub(crate) fn own(&self, position: u64, part_len: u64) -> Range<u64> {
        let start = self.mesh.fold(position, &self.axes) * part_len;
        start..start + part_len
    }

    /// The buffer of which the rank at a position holds a part.
    pub(crate) fn buffer(&self, position: u64) -> Result<Arc<Buffer>> {
        let shaping = self.shaping.iter();
        let at = shaping
            .map(|&axis| self.mesh.coordinate(position, axis) * self.mesh.stride(axis))
            .sum();
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = kept().buffers.get(&at) {
            return Ok(Arc::clone(buffer));
        }
        let buffer = Arc::new(self.make(position)?);
        let mut kept = kept();
        kept.n_blocks += buffer.blocks.len();
        if kept.n_blocks > MAX_KEPT {
            kept.n_blocks = buffer.blocks.len();
            kept.buffers.clear();
        }
        kept.buffers.insert(at, Arc::clone(&buffer));
        Ok(buffer)
    }

    fn make(&self, position: u64) -> Result<Buffer> {
        let mut blocks = Vec::new();
        let mut end = 0_u64;
        let long = || fault(&self.name, "it is too long");
        for (number, (_, layout)) in (0..).zip(&self.keys) {
            if !layout.holds(position) {
                continue;
            }
            let start = end.checked_next_multiple_of(self.align).ok_or_else(long)?;
            end = start
                .checked_add(layout.block_len(position))
                .filter(|end| *end < MAX_ELEMENTS)
                .ok_or_else(long)?;
            blocks.push(Block { number, start, end });
        }
        let n_parts = self.mesh.n_folded(&self.axes);
        let unit = n_parts.checked_mul(self.align).ok_or_else(long)?;
        let total = end
            .checked_next_multiple_of(unit)
            .filter(|total| *total < MAX_ELEMENTS)
            .ok_or_else(long)?;
        Ok(Buffer {
            blocks,
            keys: OnceLock::new(),
            part_len: total / n_parts,
        })
    }
}

impl Buffer {
    /// Whether there is no block: the rank holds none of the tensors.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Where the block of a tensor begins, if there is one.
    pub(crate) fn span(&self, number: u32) -> Option<FlatSpan> {
        let found = self
            .blocks
            .binary_search_by_key(&number, |block| block.number);
        let block = &self.blocks[found.ok()?];
        Some(FlatSpan {
            start: block.start,
            part_len: self.part_len,
        })
    }
}

fn fault(name: &str, what: &str) -> Error {
    let message = format!("joined array `{}`: {what}", Printable(name));
    Error::new(Kind::Layout, message).key(name)
}
