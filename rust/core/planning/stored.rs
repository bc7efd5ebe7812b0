//! The stored tiles of one tensor, in one of four forms, and the selection of copies for a requested tile.
//!
//! A *grid* is symbolic: the boundaries of the parts of each dim, and the holders of each cell, either the ranks of a
//! mesh (each with a file) or a table. Irregular tensors are lists of *explicit tiles*, sorted and checked to be
//! disjoint. Some of their dims can have factors; then the regions are in factored dims. Tensors in *flat* arrays are a
//! number each (see `flat`), those that a layout *divides* otherwise are computed (see `divided`). Files are numbers; the
//! index opens them.

use crate::bytes::strided::{CopyDims, Dim, merge_dims};
use crate::error::{Error, Kind, Printable, Result};
use crate::geometry::dtype::{Dtype, n_elements};
use crate::geometry::layout::{Cuts, Layout};
use crate::geometry::region::{Dims, Region, row_major_strides};
use crate::geometry::tile::Tile;
use crate::planning::divided::{Divided, Held};
use crate::planning::factors::Factors;
use crate::planning::flat::{Flat, Piece, range_of};
use crate::planning::plan::{CopyOp, strided_copy};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// Most replicas of a shard among which one is chosen. More candidates do not improve the balance.
const MAX_CANDIDATES: u64 = 16;

/// Limit of steps per tile in the check that explicit tiles are disjoint. Typical layouts need a few steps.
const MAX_SWEEP_STEPS: u64 = 4096;

/// The number of a file of zeros: a stored tensor in it is padding that a name map declares, and is in no file.
pub const ZEROS: u32 = u32::MAX;

/// Most tiles to which the tiles of a tensor in factored dims are expanded.
const MAX_RUNS: u64 = 1 << 22;

#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) key: Arc<str>,
    pub(crate) shape: Vec<u64>,
    /// Given by the caller, or read from the first shard file that is opened.
    pub(crate) dtype: OnceLock<Dtype>,
    pub(crate) form: Form,
}

#[derive(Debug)]
pub(crate) enum Form {
    Grid(Grid),
    /// Boxed: most tensors are grids, which are smaller.
    Tiles(Box<Tiles>),
    Flat(Flat),
    Divided(Divided),
}

#[derive(Debug)]
pub(crate) struct Grid {
    pub(crate) cuts: Vec<Cuts>,
    /// `order[j]` is the global dim at storage position `j`.
    pub(crate) order: Cow<'static, [usize]>,
    pub(crate) holders: Holders,
}

#[derive(Debug)]
pub(crate) enum Holders {
    /// One file that holds the complete tensor.
    File(u32),
    /// The ranks of a mesh, and the file of each position.
    Mesh(Arc<Layout>, Arc<[u32]>),
    /// For each cell, row-major: `files[starts[cell]..starts[cell + 1]]`.
    /// Tensors that lie alike share them.
    Table {
        starts: Arc<[u32]>,
        files: Arc<[u32]>,
    },
    /// The file of each cell, row-major. A file can hold several, each under its [`cell_name`].
    Cells(Box<[u32]>),
}

/// The stored name of a cell of a tensor of which a file can hold several.
pub fn cell_name(cell: u64, key: &str) -> String {
    format!("{cell}@{key}")
}

/// Explicit tiles of one key.
#[derive(Debug)]
pub(crate) struct Tiles {
    /// The factors of the dims, if the regions are in factored dims.
    factors: Option<Factors>,
    /// Distinct regions, sorted by their offset in `dim`.
    pub(crate) regions: Vec<Region>,
    /// The replicas of each region.
    pub(crate) replicas: Vec<Vec<Replica>>,
    pub(crate) tensors: Vec<StoredTensor>,
    pub(crate) dim: usize,
    /// For each region the largest end in `dim` of all regions up to it.
    pub(crate) max_end: Vec<u64>,
}

/// A stored copy of a region.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) tensor: u32,
    pub(crate) local_offset: u64,
    pub(crate) local_strides: Vec<u64>,
}

/// A tensor in a shard file that holds tiles.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    /// Number of the file, or [`ZEROS`].
    pub file: u32,
    /// Its stored name.
    pub name: String,
    /// Its stored shape.
    pub shape: Vec<u64>,
}

/// The order of dims that are stored in their order. 100,000 tensors share it.
pub(crate) fn in_order(n_dims: usize) -> Cow<'static, [usize]> {
    const DIMS: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7];
    DIMS.get(..n_dims)
        .map_or_else(|| (0..n_dims).collect(), Cow::Borrowed)
}

/// One copy of a plan before its file is opened.
#[derive(Debug)]
pub(crate) struct SelectedCopy<'a> {
    pub(crate) file: u32,
    pub(crate) name: Cow<'a, str>,
    pub(crate) stored_shape: Vec<u64>,
    /// First element in the stored tensor.
    pub(crate) src: u64,
    pub(crate) copy_op: CopyOp,
    /// `None`: see [`select_whole`].
    pub(crate) boxes: Option<Boxes>,
}

/// One copy of a complete cell of a grid.
#[derive(Debug)]
pub(crate) struct CellCopy {
    pub(crate) file: u32,
    pub(crate) stored_shape: Vec<u64>,
    /// First element in the tensor.
    pub(crate) dst: u64,
    pub(crate) dims: CopyDims,
}

/// The box that is copied, in the global tensor, and the tiles around it.
#[derive(Debug)]
pub(crate) struct Boxes {
    common: Region,
    source: Tile,
    to: (u64, Vec<u64>),
}

impl Boxes {
    /// First element and dims of the copy where the stored tensor has strides of its own.
    ///
    /// # Errors
    /// The stored tensor is used in parts.
    pub(crate) fn strided(&self, stored_shape: &[u64], strides: &[u64]) -> Result<(u64, CopyDims)> {
        let used = (self.source.local_offset, &*self.source.local_strides);
        let strides = strides_of_parts(stored_shape, strides, used)?;
        let source = Tile {
            global: self.source.global.clone(),
            local_offset: 0,
            local_strides: strides.to_vec(),
        };
        let at = (source.local_at(self.common.offset()), strides);
        let (src, _, dims) = strided_copy(&self.common, at, (self.to.0, &self.to.1));
        Ok((src, dims))
    }
}

/// The strides of a stored tensor that has its own, which is used by `(first element, strides)` as if it were row-major.
///
/// # Errors
/// It is used in parts.
pub(crate) fn strides_of_parts<'a>(
    stored_shape: &[u64],
    own: &'a [u64],
    used: (u64, &[u64]),
) -> Result<&'a [u64]> {
    if used == (0, &*row_major_strides(stored_shape)) {
        return Ok(own);
    }
    let message = "a tensor is stored with strides of its own, and only parts of it belong to the checkpoint's tensor";
    Err(Error::new(Kind::Unsupported, message))
}

impl Stored {
    /// The files that hold all of it, in row-major order, as listed; `None` if it is stored otherwise.
    pub(crate) fn only_cell(&self) -> Option<&[u32]> {
        let Form::Grid(grid) = &self.form else {
            return None;
        };
        let is_whole = |(cuts, &shape): (&Cuts, &u64)| matches!(cuts, Cuts::Even { extent, n_parts: 1 } if *extent == shape);
        let is_only = grid.cuts.len() == self.shape.len()
            && grid.cuts.iter().zip(&self.shape).all(is_whole)
            && grid.order.is_sorted();
        match &grid.holders {
            Holders::File(file) if is_only => Some(std::slice::from_ref(file)),
            Holders::Table { starts, files } if is_only => {
                files.get(*starts.first()? as usize..*starts.get(1)? as usize)
            }
            _ => None,
        }
    }
}

impl Grid {
    /// A grid of one cell: the complete tensor in one file.
    pub(crate) fn whole(shape: &[u64], file: u32) -> Self {
        let cuts = shape
            .iter()
            .map(|&extent| Cuts::Even { extent, n_parts: 1 });
        Self {
            cuts: cuts.collect(),
            order: in_order(shape.len()),
            holders: Holders::File(file),
        }
    }

    /// The file that holds a tensor of this shape completely and in row-major order, if there is one and no other.
    pub(crate) fn only_file(&self, shape: &[u64]) -> Option<u32> {
        let is_whole = self.order.iter().enumerate().all(|(j, &d)| j == d)
            && self.cuts.iter().zip(shape).all(|(cuts, &extent)| {
                let has_one = !matches!(cuts, Cuts::Blocks(..));
                has_one && cuts.n_parts() == 1 && cuts.part(0) == (0, extent)
            });
        match &self.holders {
            _ if !is_whole => None,
            Holders::File(file) => Some(*file),
            Holders::Table { starts, files } => {
                match files[..][starts[0] as usize..starts[1] as usize] {
                    [file] => Some(file),
                    _ => None,
                }
            }
            Holders::Mesh(..) | Holders::Cells(_) => None,
        }
    }

    /// The stored name of a cell.
    pub(crate) fn name<'a>(&self, cell: u64, key: &'a str) -> Cow<'a, str> {
        match self.holders {
            Holders::Cells(_) => Cow::Owned(cell_name(cell, key)),
            _ => Cow::Borrowed(key),
        }
    }

    pub(crate) fn n_cells(&self) -> u64 {
        self.cuts.iter().map(Cuts::n_parts).product()
    }

    /// The parts of a cell, one per dim, from its row-major number.
    pub(crate) fn parts(&self, mut cell: u64) -> Vec<u64> {
        let mut parts = vec![0; self.cuts.len()];
        for (part, cuts) in parts.iter_mut().zip(&self.cuts).rev() {
            *part = cell % cuts.n_parts();
            cell /= cuts.n_parts();
        }
        parts
    }

    pub(crate) fn region_of(&self, parts: &[u64]) -> Region {
        let ranges: Vec<_> = self
            .cuts
            .iter()
            .zip(parts)
            .map(|(cuts, part)| cuts.part(*part))
            .collect();
        let region = Region::new(
            ranges.iter().map(|r| r.0).collect(),
            ranges.iter().map(|r| r.1 - r.0).collect(),
        );
        region.expect("inside a tensor whose size fits")
    }

    pub(crate) fn region(&self, cell: u64) -> Region {
        self.region_of(&self.parts(cell))
    }

    pub(crate) fn cell(&self, parts: &[u64]) -> u64 {
        self.cuts
            .iter()
            .zip(parts)
            .fold(0, |cell, (cuts, part)| cell * cuts.n_parts() + part)
    }

    /// The files that hold a cell; if there are more than `max` replicas, an evenly spaced sample.
    pub(crate) fn files(&self, cell: u64, max: u64) -> Vec<u32> {
        match &self.holders {
            Holders::File(file) => vec![*file],
            Holders::Table { starts, files } => {
                files[starts[cell as usize] as usize..starts[cell as usize + 1] as usize].to_vec()
            }
            Holders::Cells(files) => vec![files[cell as usize]],
            Holders::Mesh(layout, files) => {
                let mesh = layout.mesh();
                let partitioned: u64 = layout
                    .dims()
                    .iter()
                    .zip(self.parts(cell))
                    .map(|(dim, part)| mesh.unfold(part, &dim.axes))
                    .sum();
                let base = partitioned + layout.fixed_position();
                let free = layout.free_axes();
                let n = mesh.n_folded(&free);
                let n_sampled = n.min(max);
                // The sample begins at a different replica for each cell, so that ties do not select the same file.
                (0..n_sampled)
                    .map(|k| {
                        files[(base + mesh.unfold((k * n / n_sampled + cell) % n, &free)) as usize]
                    })
                    .collect()
            }
        }
    }

    /// The stored shape of the region of a cell, and its tile: the complete stored array, with dims in storage order.
    fn stored_tile(&self, region: Region) -> (Vec<u64>, Tile) {
        let stored_shape: Vec<u64> = self.order.iter().map(|&d| region.shape()[d]).collect();
        let storage = row_major_strides(&stored_shape);
        let mut strides = vec![0; stored_shape.len()];
        for (j, &d) in self.order.iter().enumerate() {
            strides[d] = storage[j];
        }
        let tile = Tile {
            global: region,
            local_offset: 0,
            local_strides: strides,
        };
        (stored_shape, tile)
    }

    /// The stored array of each cell in each file that holds it.
    pub(crate) fn stored_arrays(&self, key: &str) -> Vec<(StoredTensor, Vec<Tile>)> {
        (0..self.n_cells())
            .flat_map(|cell| {
                let (shape, tile) = self.stored_tile(self.region(cell));
                let files = self.files(cell, u64::MAX).into_iter();
                files.map(move |file| {
                    let name = self.name(cell, key).into_owned();
                    let shape = shape.clone();
                    (StoredTensor { file, name, shape }, vec![tile.clone()])
                })
            })
            .collect()
    }

    pub(crate) fn check_coverage(&self, stored: &Stored) -> Result<()> {
        for (d, cuts) in self.cuts.iter().enumerate() {
            if !cuts.covers(stored.shape[d]) {
                let message = format!(
                    "{}: the parts of dim {d} do not cover its {} elements",
                    named(&stored.key),
                    stored.shape[d]
                );
                return Err(Error::new(Kind::Coverage, message).key(&stored.key));
            }
        }
        // The ranks of a mesh hold every cell by construction: axes that split, place and replicate are disjoint.
        if let Holders::Table { starts, .. } = &self.holders {
            let n_cells = self.n_cells();
            let empty =
                (0..n_cells).find(|&cell| starts[cell as usize] == starts[cell as usize + 1]);
            if let Some(cell) = empty {
                return Err(no_holder(&stored.key, &self.region(cell)));
            }
        }
        Ok(())
    }

    /// The copies of all of a tensor that has elements, as [`Self::select`] selects them, without lists of each region.
    /// `None`: there is something wrong with the grid, which [`Self::select`] reports.
    pub(crate) fn select_all(&self, shape: &[u64], chosen: &mut [u64]) -> Option<Vec<CellCopy>> {
        let covers = |(cuts, &extent): (&Cuts, &u64)| match cuts {
            Cuts::Even {
                extent: of,
                n_parts,
            } => *of == extent && extent.is_multiple_of(*n_parts),
            Cuts::Ceil { extent: of, .. } => *of == extent,
            Cuts::Listed(bounds) => bounds.first() == Some(&0) && bounds.last() == Some(&extent),
            Cuts::Blocks(..) => false,
        };
        if self.cuts.len() != shape.len() || !self.cuts.iter().zip(shape).all(covers) {
            return None;
        }
        let to = row_major_strides(shape);
        let n_cells = self.n_cells();
        let mut copies = Vec::new();
        for cell in 0..n_cells {
            let (mut dst, mut rest) = (0, cell);
            let mut dims: CopyDims = to
                .iter()
                .map(|&dst| Dim {
                    len: 0,
                    src: 0,
                    dst,
                })
                .collect();
            for ((dim, cuts), stride) in dims.iter_mut().zip(&self.cuts).zip(&to).rev() {
                let (start, end) = cuts.part(rest % cuts.n_parts());
                rest /= cuts.n_parts();
                dst += start * stride;
                dim.len = end - start;
            }
            let n: u64 = dims.iter().map(|dim| dim.len).product();
            if n == 0 {
                continue;
            }
            let file = match &self.holders {
                Holders::Table { starts, files } => {
                    let cell = cell as usize;
                    choose(
                        files.get(starts[cell] as usize..starts[cell + 1] as usize)?,
                        chosen,
                        n,
                    )?
                }
                _ => choose(&self.files(cell, MAX_CANDIDATES), chosen, n)?,
            };
            let stored_shape: Vec<u64> = self.order.iter().map(|&d| dims[d].len).collect();
            let mut stride = 1;
            for &d in self.order.iter().rev() {
                dims[d].src = stride;
                stride *= dims[d].len;
            }
            copies.push(CellCopy {
                file,
                stored_shape,
                dst,
                dims: merge_dims(dims),
            });
        }
        Some(copies)
    }

    pub(crate) fn select<'a>(
        &self,
        key: &'a str,
        tile: &Tile,
        chosen: &mut [u64],
        selected: &mut Vec<SelectedCopy<'a>>,
    ) -> Result<()> {
        let requested = &tile.global;
        let over: Vec<_> = self
            .cuts
            .iter()
            .enumerate()
            .map(|(d, c)| c.parts_over(requested.offset()[d], requested.end(d)))
            .collect();
        let mut parts: Vec<u64> = over.iter().map(|range| range.start).collect();
        loop {
            let region = self.region_of(&parts);
            if let Some(common) = requested.intersect(&region) {
                let cell = self.cell(&parts);
                let n = common.n_elements();
                let file = choose(&self.files(cell, MAX_CANDIDATES), chosen, n)
                    .ok_or_else(|| no_holder(key, &region))?;
                let (stored_shape, source) = self.stored_tile(region);
                let name = self.name(cell, key);
                selected.push(selected_copy(
                    file,
                    name,
                    stored_shape,
                    common,
                    source,
                    tile,
                ));
            }
            // The next cell in row-major order.
            let Some(d) = (0..parts.len()).rev().find(|&d| parts[d] + 1 < over[d].end) else {
                return Ok(());
            };
            parts[d] += 1;
            for later in d + 1..parts.len() {
                parts[later] = over[later].start;
            }
        }
    }
}

impl Tiles {
    pub(crate) fn new(
        shape: &[u64],
        factors: Option<Factors>,
        stored: Vec<(StoredTensor, Vec<Tile>)>,
        n_files: usize,
        overlapping: bool,
    ) -> Result<Self> {
        let factored = factors.as_ref().map(Factors::shape);
        let shape = factored.as_deref().unwrap_or(shape);
        let mut tensors = Vec::new();
        let mut by_region: HashMap<Region, Vec<Replica>> = HashMap::new();
        for (tensor, tiles) in stored {
            let n = n_elements(&tensor.shape);
            if tensor.file != ZEROS && tensor.file as usize >= n_files {
                return Err(Error::new(
                    Kind::Argument,
                    format!("there is no file {}", tensor.file),
                ));
            }
            let Some(n) = n else {
                return Err(Error::damaged(format!(
                    "stored shape {} is too large",
                    Dims(&tensor.shape)
                )));
            };
            for tile in tiles {
                if !tile.global.lies_in(shape) || tile.local_strides.len() != shape.len() {
                    let message = format!(
                        "a tile of {} is outside the shape {}",
                        tile.global,
                        Dims(shape)
                    );
                    return Err(Error::damaged(message));
                }
                if tile.local_end().is_none_or(|end| end > n) {
                    let message = format!(
                        "the tile of {} is outside the stored tensor of shape {}",
                        tile.global,
                        Dims(&tensor.shape)
                    );
                    return Err(Error::damaged(message));
                }
                if !tile.global.is_empty() {
                    let replica = Replica {
                        tensor: tensors.len() as u32,
                        local_offset: tile.local_offset,
                        local_strides: tile.local_strides,
                    };
                    by_region.entry(tile.global).or_default().push(replica);
                }
            }
            tensors.push(tensor);
        }
        // Searches use the dim with the most distinct offsets.
        let distinct = |d: usize| {
            by_region
                .keys()
                .map(|r| r.offset()[d])
                .collect::<std::collections::HashSet<_>>()
                .len()
        };
        let dim = (0..shape.len())
            .max_by_key(|&d| (distinct(d), std::cmp::Reverse(d)))
            .unwrap_or(0);
        let mut sorted: Vec<_> = by_region.into_iter().collect();
        sorted.sort_by(|(a, _), (b, _)| (a.offset().get(dim), a).cmp(&(b.offset().get(dim), b)));
        let (regions, replicas): (Vec<_>, Vec<_>) = sorted.into_iter().unzip();
        if !overlapping {
            check_disjoint(&regions)?;
        }
        let mut end = 0;
        let max_end = regions
            .iter()
            .map(|region: &Region| {
                end = end.max(if shape.is_empty() { 1 } else { region.end(dim) });
                end
            })
            .collect();
        Ok(Self {
            factors,
            regions,
            replicas,
            tensors,
            dim,
            max_end,
        })
    }

    /// Each stored tensor with its tiles, in the dims of the tensor.
    pub(crate) fn stored_arrays(&self, key: &str) -> Result<Vec<(StoredTensor, Vec<Tile>)>> {
        if let Some(factors) = &self.factors {
            let runs = |(region, replicas): (&Region, &Vec<Replica>)| {
                let n_runs = |replica: &Replica| factors.n_runs(region, &replica.local_strides);
                replicas.iter().map(n_runs).fold(0, u64::saturating_add)
            };
            let n_runs = self.regions.iter().zip(&self.replicas).map(runs);
            let n_runs = n_runs.fold(0, u64::saturating_add);
            if n_runs > MAX_RUNS {
                let message = format!(
                    "{} consists of {n_runs} runs of interleaved rows; at most {MAX_RUNS} can be listed",
                    named(key)
                );
                return Err(Error::new(Kind::Unsupported, message).key(key));
            }
        }
        let mut stored: Vec<_> = self
            .tensors
            .iter()
            .map(|tensor| (tensor.clone(), Vec::new()))
            .collect();
        for (region, replicas) in self.regions.iter().zip(&self.replicas) {
            for replica in replicas {
                let tile = Tile {
                    global: region.clone(),
                    local_offset: replica.local_offset,
                    local_strides: replica.local_strides.clone(),
                };
                let tiles = &mut stored[replica.tensor as usize].1;
                match &self.factors {
                    None => tiles.push(tile),
                    Some(factors) => tiles.extend(factors.join(&tile)),
                }
            }
        }
        Ok(stored)
    }

    /// Each region, or its bounding box in the dims of the tensor, and the files that hold it.
    pub(crate) fn shards(&self) -> Vec<(Region, Vec<u32>)> {
        let shard = |(region, replicas): (&Region, &Vec<Replica>)| {
            let bounding_box = self
                .factors
                .as_ref()
                .map(|factors| factors.bounding_box(region));
            let files = replicas
                .iter()
                .map(|replica| self.tensors[replica.tensor as usize].file)
                .filter(|&file| file != ZEROS);
            (
                bounding_box.unwrap_or_else(|| region.clone()),
                files.collect(),
            )
        };
        self.regions.iter().zip(&self.replicas).map(shard).collect()
    }

    /// The regions that may overlap a requested one.
    pub(crate) fn over(&self, requested: &Region) -> std::ops::Range<usize> {
        if requested.rank() == 0 {
            return 0..self.regions.len();
        }
        let (start, end) = (requested.offset()[self.dim], requested.end(self.dim));
        let first = self.max_end.partition_point(|e| *e <= start);
        let last = self
            .regions
            .partition_point(|region| region.offset()[self.dim] < end);
        first..last.max(first)
    }

    pub(crate) fn check_coverage(&self, stored: &Stored) -> Result<()> {
        if n_elements(&stored.shape) == Some(0) {
            return Ok(());
        }
        let factored = self.factors.as_ref().map(Factors::shape);
        let whole = Region::whole(factored.as_deref().unwrap_or(&stored.shape));
        let covered: u128 = self
            .regions
            .iter()
            .map(|region| u128::from(region.n_elements()))
            .sum();
        if covered == u128::from(whole.n_elements()) && check_disjoint(&self.regions).is_ok() {
            return Ok(());
        }
        let mut uncovered = vec![whole];
        for region in &self.regions {
            uncovered = uncovered
                .iter()
                .flat_map(|rest| rest.subtract(region))
                .collect();
            if uncovered.len() > 1 << 16 {
                let message = format!(
                    "{}: its {} tiles are too irregular to check their coverage",
                    named(&stored.key),
                    self.regions.len()
                );
                return Err(Error::new(Kind::Unsupported, message).key(&stored.key));
            }
        }
        uncovered
            .first()
            .map_or(Ok(()), |region| Err(self.coverage_error(stored, region)))
    }

    fn coverage_error(&self, stored: &Stored, uncovered: &Region) -> Error {
        let factors = self.factors.as_ref();
        let uncovered =
            factors.map_or_else(|| uncovered.clone(), |factors| factors.first_run(uncovered));
        let message = format!(
            "the stored shards of {} leave {uncovered} uncovered",
            named(&stored.key)
        );
        let hint = format!(
            "{} regions of it are stored; a shard file is missing, or its metadata is incomplete",
            self.regions.len()
        );
        Error::new(Kind::Coverage, message)
            .key(&stored.key)
            .hint(hint)
    }

    pub(crate) fn select<'a>(
        &'a self,
        stored: &'a Stored,
        tile: &Tile,
        chosen: &mut [u64],
        selected: &mut Vec<SelectedCopy<'a>>,
    ) -> Result<()> {
        let Some(factors) = &self.factors else {
            return self.select_box(stored, tile, chosen, selected);
        };
        let mut parts = factors.split(tile).into_iter();
        parts.try_for_each(|part| self.select_box(stored, &part, chosen, selected))
    }

    /// As [`Self::select`], for a tile in the dims of the regions.
    fn select_box<'a>(
        &'a self,
        stored: &'a Stored,
        tile: &Tile,
        chosen: &mut [u64],
        selected: &mut Vec<SelectedCopy<'a>>,
    ) -> Result<()> {
        // `rest` shrinks by each region that is used, so that overlapping regions give every element once.
        let mut rest = vec![tile.global.clone()];
        for i in self.over(&tile.global) {
            if rest.is_empty() {
                break;
            }
            let region = &self.regions[i];
            if tile.global.intersect(region).is_none() {
                continue;
            }
            let mut left = Vec::with_capacity(rest.len());
            for requested in rest {
                let Some(common) = requested.intersect(region) else {
                    left.push(requested);
                    continue;
                };
                left.extend(requested.subtract(&common));
                let files: Vec<u32> = self.replicas[i]
                    .iter()
                    .take(MAX_CANDIDATES as usize)
                    .map(|p| self.tensors[p.tensor as usize].file)
                    .collect();
                let file = choose(&files, chosen, common.n_elements())
                    .expect("a region has at least one replica");
                let replica = self.replicas[i]
                    .iter()
                    .find(|p| self.tensors[p.tensor as usize].file == file)
                    .expect("the file was chosen from the replicas");
                let tensor = &self.tensors[replica.tensor as usize];
                let source = Tile {
                    global: region.clone(),
                    local_offset: replica.local_offset,
                    local_strides: replica.local_strides.clone(),
                };
                let shape = tensor.shape.clone();
                selected.push(selected_copy(
                    file,
                    Cow::Borrowed(&tensor.name),
                    shape,
                    common,
                    source,
                    tile,
                ));
            }
            rest = left;
        }
        rest.first()
            .map_or(Ok(()), |region| Err(self.coverage_error(stored, region)))
    }
}

/// Each array that holds elements of a tensor of a shape, and its tiles.
pub(crate) fn arrays_of_flat(flat: &Flat, shape: &[u64]) -> Vec<(StoredTensor, Vec<Tile>)> {
    let array = |piece: Piece<'_>| {
        let tensor = StoredTensor {
            file: piece.file,
            name: piece.name.to_owned(),
            shape: piece.shape.to_vec(),
        };
        (tensor, piece.tiles(shape).collect())
    };
    flat.pieces().map(array).collect()
}

/// Selects the copies of a tile, which is not empty, of a tensor of a shape in flat arrays.
pub(crate) fn select_flat<'a>(
    flat: &'a Flat,
    shape: &[u64],
    tile: &Tile,
    chosen: &mut [u64],
    selected: &mut Vec<SelectedCopy<'a>>,
) {
    for piece in flat.pieces_over(range_of(&tile.global, shape)) {
        for source in piece.tiles(shape) {
            let Some(common) = tile.global.intersect(&source.global) else {
                continue;
            };
            chosen[piece.file as usize] += common.n_elements();
            let stored_shape = piece.shape.to_vec();
            let name = Cow::Borrowed(piece.name);
            let copy = selected_copy(piece.file, name, stored_shape, common, source, tile);
            selected.push(copy);
        }
    }
}

/// Each array that holds a part of a tensor that a layout divides, and its tiles.
pub(crate) fn arrays_of_divided(
    divided: &Divided,
    key: &str,
) -> Result<Vec<(StoredTensor, Vec<Tile>)>> {
    let array = |place| {
        let tensor = StoredTensor {
            file: divided.file(place),
            name: divided.name(key).to_owned(),
            shape: divided.shape(place),
        };
        (tensor, divided.tiles(place))
    };
    Ok(divided.places()?.into_iter().map(array).collect())
}

/// Selects the copies of a tile, which is not empty, of a tensor that a layout divides.
pub(crate) fn select_divided<'a>(
    divided: &'a Divided,
    key: &'a str,
    tile: &Tile,
    chosen: &mut [u64],
    selected: &mut Vec<SelectedCopy<'a>>,
) -> Result<()> {
    let name = divided.name(key);
    divided.each_over(key, &tile.global, MAX_CANDIDATES, |held| {
        let Held {
            region,
            source,
            shape,
            files,
        } = held;
        let file = choose(&files, chosen, region.n_elements()).expect("each part has a file");
        let name = Cow::Borrowed(name);
        selected.push(selected_copy(file, name, shape, region, source, tile));
    })
}

/// Checks that regions do not overlap. They are split along one dim after the other into groups that overlap in that
/// dim; a group that no dim splits further is compared pair by pair.
fn check_disjoint(regions: &[Region]) -> Result<()> {
    let mut group: Vec<&Region> = regions.iter().collect();
    let mut steps = (regions.len() as u64 + 16) * MAX_SWEEP_STEPS;
    split_groups(&mut group, 0, 0, &mut steps)
}

fn split_groups(group: &mut [&Region], dim: usize, unsplit: usize, steps: &mut u64) -> Result<()> {
    if group.len() < 2 {
        return Ok(());
    }
    let rank = group[0].rank();
    *steps = steps
        .checked_sub(group.len() as u64)
        .ok_or_else(too_irregular)?;
    if unsplit >= rank {
        for (i, a) in group.iter().enumerate() {
            for b in &group[i + 1..] {
                *steps = steps.checked_sub(1).ok_or_else(too_irregular)?;
                if let Some(common) = a.intersect(b) {
                    let message = format!(
                        "stored regions {a} and {b} overlap in {common} and are not replicas of each other"
                    );
                    return Err(Error::new(Kind::Coverage, message));
                }
            }
        }
        return Ok(());
    }
    group.sort_by_key(|region| (region.offset()[dim], region.end(dim)));
    let next = (dim + 1) % rank;
    let (mut start, mut end) = (0, group[0].end(dim));
    let mut bounds = Vec::new();
    for (i, region) in group.iter().enumerate() {
        if region.offset()[dim] >= end {
            bounds.push((start, i));
            start = i;
        }
        end = end.max(region.end(dim));
    }
    bounds.push((start, group.len()));
    let unsplit = if bounds.len() == 1 { unsplit + 1 } else { 1 };
    for (from, to) in bounds {
        split_groups(&mut group[from..to], next, unsplit, steps)?;
    }
    Ok(())
}

fn too_irregular() -> Error {
    Error::new(
        Kind::Unsupported,
        "the stored tiles are too irregular to check that they do not overlap",
    )
}

/// Chooses the file with the fewest elements so far and adds `n` to it.
pub(crate) fn choose(files: &[u32], chosen: &mut [u64], n: u64) -> Option<u32> {
    // Zeros are in no file, so nothing is read for them.
    let read = |file: u32| chosen.get(file as usize).copied().unwrap_or(0);
    let file = files.iter().copied().min_by_key(|&file| read(file))?;
    if let Some(chosen) = chosen.get_mut(file as usize) {
        *chosen += n;
    }
    Some(file)
}

/// Selects the copy of a tile out of a tensor of a shape that a file holds in row-major order, without gaps. As
/// [`Grid::select`] of [`Grid::whole`], which makes a dozen lists for each of 100,000 tensors.
pub(crate) fn select_whole<'a>(
    (key, shape): (&'a str, &[u64]),
    file: u32,
    tile: &Tile,
    chosen: &mut [u64],
    selected: &mut Vec<SelectedCopy<'a>>,
) {
    let (offset, extents) = (tile.global.offset(), tile.global.shape());
    let mut dims = CopyDims::new();
    let (mut src, mut stride) = (0, 1);
    for d in (0..shape.len()).rev() {
        dims.push(Dim {
            len: extents[d],
            src: stride,
            dst: tile.local_strides[d],
        });
        src += offset[d] * stride;
        stride *= shape[d];
    }
    dims.reverse();
    chosen[file as usize] += tile.global.n_elements();
    selected.push(SelectedCopy {
        file,
        name: Cow::Borrowed(key),
        stored_shape: shape.to_vec(),
        src,
        copy_op: CopyOp {
            source: 0,
            src_start_bytes: 0,
            dst: tile.local_offset,
            dims: merge_dims(dims),
        },
        boxes: None,
    });
}

fn selected_copy<'a>(
    file: u32,
    name: Cow<'a, str>,
    stored_shape: Vec<u64>,
    common: Region,
    source: Tile,
    wanted: &Tile,
) -> SelectedCopy<'a> {
    let at = (source.local_at(common.offset()), &source.local_strides[..]);
    let to = (wanted.local_at(common.offset()), &wanted.local_strides[..]);
    let (src, dst, dims) = strided_copy(&common, at, to);
    let to = (to.0, wanted.local_strides.clone());
    SelectedCopy {
        file,
        name,
        stored_shape,
        src,
        copy_op: CopyOp {
            source: 0,
            src_start_bytes: 0,
            dst,
            dims,
        },
        boxes: Some(Boxes { common, source, to }),
    }
}

pub(crate) fn no_holder(key: &str, region: &Region) -> Error {
    let message = format!(
        "the stored shards of {} leave {region} uncovered",
        named(key)
    );
    Error::new(Kind::Coverage, message).key(key)
}

pub(crate) fn named(key: &str) -> String {
    format!("`{}`", Printable(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_tensor_is_selected_as_a_grid_of_one_cell() {
        let shapes: [&[u64]; 5] = [&[], &[7], &[3, 5], &[1, 4, 1], &[2, 3, 4, 5]];
        for shape in shapes {
            let mut tiles = vec![Region::whole(shape)];
            for d in 0..shape.len() {
                for (from, to) in [(0, shape[d] - 1), (1, shape[d]), (shape[d] / 2, shape[d])] {
                    if from < to {
                        let (mut offset, mut extents) = (vec![0; shape.len()], shape.to_vec());
                        (offset[d], extents[d]) = (from, to - from);
                        tiles.push(Region::new(offset, extents).unwrap());
                    }
                }
            }
            for global in tiles {
                let mut local_strides = row_major_strides(global.shape());
                for stride in &mut local_strides {
                    *stride *= 2;
                }
                let tile = Tile {
                    global,
                    local_offset: 3,
                    local_strides,
                };
                let (mut fast, mut slow) = (Vec::new(), Vec::new());
                let (mut of_fast, mut of_slow) = ([0; 2], [0; 2]);
                select_whole(("k", shape), 1, &tile, &mut of_fast, &mut fast);
                let grid = Grid::whole(shape, 1);
                assert_eq!(grid.only_file(shape), Some(1));
                grid.select("k", &tile, &mut of_slow, &mut slow).unwrap();
                let of = |one: &[SelectedCopy<'_>]| {
                    let [one] = one else { panic!("one copy") };
                    (
                        one.file,
                        one.stored_shape.clone(),
                        one.src,
                        one.copy_op.clone(),
                    )
                };
                assert_eq!(of(&fast), of(&slow), "{shape:?} {}", tile.global);
                assert_eq!(of_fast, of_slow);
            }
        }
    }

    #[test]
    fn a_tensor_in_parts_or_in_another_order_has_no_only_file() {
        let mut grid = Grid::whole(&[4, 6], 0);
        grid.order = vec![1, 0].into();
        assert_eq!(grid.only_file(&[4, 6]), None);
        grid = Grid::whole(&[4, 6], 0);
        grid.cuts[1] = Cuts::Listed(vec![0, 2, 6]);
        assert_eq!(grid.only_file(&[4, 6]), None);
        grid = Grid::whole(&[4, 6], 0);
        assert_eq!(grid.only_file(&[4, 8]), None);
        grid.holders = Holders::Table {
            starts: [0, 2].into(),
            files: [3, 4].into(),
        };
        assert_eq!(grid.only_file(&[4, 6]), None, "replicas are chosen among");
    }
}
