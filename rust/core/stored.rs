//! The stored tiles of one tensor, in one of two forms, and the copies that a wanted tile needs of them.
//!
//! A *grid* is symbolic: per dim where it is cut, and for a cell of the grid who holds it, either the ranks of a mesh
//! (whose files are known by rank) or a table. Everything irregular is a list of *explicit tiles*, sorted, and checked
//! to be disjoint by a sweep; some of their dims can be described by factors, in which all of that is done. Files are numbers here; who opens them is the index.

use crate::dtype::{Dtype, n_elements};
use crate::error::{Error, Kind, Printable, Result};
use crate::factors::Factors;
use crate::layout::{Cuts, Layout};
use crate::plan::{CopyOp, strided_copy};
use crate::region::{Dims, Region, row_major_strides};
use crate::strided::Dim;
use crate::tile::Tile;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// Holders of one shard that are weighed against each other; beyond that the choice gains nothing.
const MAX_CANDIDATES: u64 = 16;

/// Work bound of the check that explicit tiles are disjoint, per tile: real layouts need a few steps.
const MAX_SWEEP_STEPS: u64 = 4096;

/// Most tiles that are told of a tensor whose tiles are given in factored dims.
const MAX_RUNS: u64 = 1 << 22;

#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) key: String,
    pub(crate) shape: Vec<u64>,
    /// Known from the caller, or from the first shard file that was asked.
    pub(crate) dtype: OnceLock<Dtype>,
    pub(crate) form: Form,
}

#[derive(Debug)]
pub(crate) enum Form {
    Grid(Grid),
    Tiles(Tiles),
}

#[derive(Debug)]
pub(crate) struct Grid {
    pub(crate) cuts: Vec<Cuts>,
    /// `order[j]` is the global dim at storage position `j`.
    pub(crate) order: Vec<usize>,
    pub(crate) holders: Holders,
}

#[derive(Debug)]
pub(crate) enum Holders {
    /// One file that holds the whole.
    File(u32),
    /// The ranks of a mesh: file of each position.
    Mesh(Arc<Layout>, Arc<[u32]>),
    /// For each cell, row-major: `files[starts[cell]..starts[cell + 1]]`.
    Table { starts: Vec<u32>, files: Vec<u32> },
}

/// Explicit tiles of one key.
#[derive(Debug)]
pub(crate) struct Tiles {
    /// What the dims of the regions are, if not those of the tensor.
    factors: Option<Factors>,
    /// Distinct regions, sorted by their offset in `dim`.
    pub(crate) regions: Vec<Region>,
    /// For each region the places where it is stored.
    pub(crate) places: Vec<Vec<Place>>,
    pub(crate) tensors: Vec<StoredTensor>,
    pub(crate) dim: usize,
    /// Largest end in `dim` of the regions up to here.
    pub(crate) max_end: Vec<u64>,
}

#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) tensor: u32,
    pub(crate) local_offset: u64,
    pub(crate) local_strides: Vec<u64>,
}

/// A tensor in a shard file that holds tiles.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    /// Number of the file.
    pub file: u32,
    /// Its name there.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<u64>,
}

/// One copy of a plan before its file is opened.
#[derive(Debug)]
pub(crate) struct SelectedCopy<'a> {
    pub(crate) file: u32,
    pub(crate) name: &'a str,
    pub(crate) stored_shape: Vec<u64>,
    /// Element of the stored tensor.
    pub(crate) src: u64,
    pub(crate) copy_op: CopyOp,
    pub(crate) boxes: Boxes,
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
    pub(crate) fn strided(&self, stored_shape: &[u64], strides: &[u64]) -> Result<(u64, Vec<Dim>)> {
        let plain = row_major_strides(stored_shape);
        if self.source.local_offset != 0 || self.source.local_strides != plain {
            let message = "a tensor is stored with strides of its own, and only parts of it belong to the checkpoint's tensor";
            return Err(Error::new(Kind::Unsupported, message));
        }
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

impl Grid {
    /// One cell: the whole tensor in one file.
    pub(crate) fn whole(shape: &[u64], file: u32) -> Self {
        let cuts = shape
            .iter()
            .map(|&extent| Cuts::Even { extent, n_parts: 1 });
        Self {
            cuts: cuts.collect(),
            order: (0..shape.len()).collect(),
            holders: Holders::File(file),
        }
    }

    pub(crate) fn n_cells(&self) -> u64 {
        self.cuts.iter().map(Cuts::n_parts).product()
    }

    /// The parts of a cell, one a dim, from its row-major number.
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

    /// Files that hold a cell; of many replicas an even sample of at most `max`.
    pub(crate) fn files(&self, cell: u64, max: u64) -> Vec<u32> {
        match &self.holders {
            Holders::File(file) => vec![*file],
            Holders::Table { starts, files } => {
                files[starts[cell as usize] as usize..starts[cell as usize + 1] as usize].to_vec()
            }
            Holders::Mesh(layout, files) => {
                let mesh = layout.mesh();
                let cut: u64 = layout
                    .dims()
                    .iter()
                    .zip(self.parts(cell))
                    .map(|(dim, part)| mesh.unfold(part, &dim.axes))
                    .sum();
                let base = cut + layout.fixed_position();
                let free = layout.free_axes();
                let n = mesh.n_folded(&free);
                let n_taken = n.min(max);
                // Different cells begin their sample at different replicas, so that ties do not all fall on one file.
                (0..n_taken)
                    .map(|k| {
                        files[(base + mesh.unfold((k * n / n_taken + cell) % n, &free)) as usize]
                    })
                    .collect()
            }
        }
    }

    /// The shape in which a region of a cell is stored, and where it lies there: all of it, its dims in storage order.
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

    /// Each cell in each file that holds it.
    pub(crate) fn stored_arrays(&self, key: &str) -> Vec<(StoredTensor, Vec<Tile>)> {
        (0..self.n_cells())
            .flat_map(|cell| {
                let (shape, tile) = self.stored_tile(self.region(cell));
                let files = self.files(cell, u64::MAX).into_iter();
                files.map(move |file| {
                    let name = key.to_owned();
                    let shape = shape.clone();
                    (StoredTensor { file, name, shape }, vec![tile.clone()])
                })
            })
            .collect()
    }

    pub(crate) fn check_coverage(&self, stored: &Stored) -> Result<()> {
        for (d, cuts) in self.cuts.iter().enumerate() {
            let is_whole = match cuts {
                Cuts::Even { extent, n_parts } => {
                    *extent == stored.shape[d] && extent.is_multiple_of(*n_parts)
                }
                Cuts::Listed(bounds) => {
                    bounds.first() == Some(&0)
                        && bounds.last() == Some(&stored.shape[d])
                        && bounds.is_sorted()
                }
                Cuts::Blocks(..) => false,
            };
            if !is_whole {
                let message = format!(
                    "{}: the cuts of dim {d} do not cover its {} elements",
                    named(&stored.key),
                    stored.shape[d]
                );
                return Err(Error::new(Kind::Coverage, message).key(&stored.key));
            }
        }
        // The ranks of a mesh hold every cell by construction: the axes that cut, place and repeat are disjoint.
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

    pub(crate) fn select<'a>(
        &self,
        key: &'a str,
        tile: &Tile,
        chosen: &mut [u64],
        selected: &mut Vec<SelectedCopy<'a>>,
    ) -> Result<()> {
        let wanted = &tile.global;
        let over: Vec<_> = self
            .cuts
            .iter()
            .enumerate()
            .map(|(d, c)| c.parts_over(wanted.offset()[d], wanted.end(d)))
            .collect();
        let mut parts: Vec<u64> = over.iter().map(|range| range.start).collect();
        loop {
            let region = self.region_of(&parts);
            if let Some(common) = wanted.intersect(&region) {
                let cell = self.cell(&parts);
                let n = common.n_elements();
                let file = choose(&self.files(cell, MAX_CANDIDATES), chosen, n)
                    .ok_or_else(|| no_holder(key, &region))?;
                let (stored_shape, source) = self.stored_tile(region);
                selected.push(selected_copy(file, key, stored_shape, common, source, tile));
            }
            // The next cell, as an odometer.
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
        let mut by_region: HashMap<Region, Vec<Place>> = HashMap::new();
        for (tensor, tiles) in stored {
            let n = n_elements(&tensor.shape);
            if tensor.file as usize >= n_files {
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
                        "a tile of {} lies outside the shape {}",
                        tile.global,
                        Dims(shape)
                    );
                    return Err(Error::damaged(message));
                }
                if tile.local_end().is_none_or(|end| end > n) {
                    let message = format!(
                        "the tile of {} lies outside the stored tensor of shape {}",
                        tile.global,
                        Dims(&tensor.shape)
                    );
                    return Err(Error::damaged(message));
                }
                if !tile.global.is_empty() {
                    let place = Place {
                        tensor: tensors.len() as u32,
                        local_offset: tile.local_offset,
                        local_strides: tile.local_strides,
                    };
                    by_region.entry(tile.global).or_default().push(place);
                }
            }
            tensors.push(tensor);
        }
        // Queries walk along the dim that separates the regions best.
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
        let (regions, places): (Vec<_>, Vec<_>) = sorted.into_iter().unzip();
        if !overlapping {
            prove_disjoint(&regions)?;
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
            places,
            tensors,
            dim,
            max_end,
        })
    }

    /// Each stored tensor with its tiles, in the dims of the tensor.
    pub(crate) fn stored_arrays(&self, key: &str) -> Result<Vec<(StoredTensor, Vec<Tile>)>> {
        if let Some(factors) = &self.factors {
            let runs = |(region, places): (&Region, &Vec<Place>)| {
                let n_runs = |place: &Place| factors.n_runs(region, &place.local_strides);
                places.iter().map(n_runs).fold(0, u64::saturating_add)
            };
            let n_runs = self.regions.iter().zip(&self.places).map(runs);
            let n_runs = n_runs.fold(0, u64::saturating_add);
            if n_runs > MAX_RUNS {
                let message = format!(
                    "{} consists of {n_runs} runs of rows that take turns; at most {MAX_RUNS} are told one by one",
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
        for (region, places) in self.regions.iter().zip(&self.places) {
            for place in places {
                let tile = Tile {
                    global: region.clone(),
                    local_offset: place.local_offset,
                    local_strides: place.local_strides.clone(),
                };
                let own = &mut stored[place.tensor as usize].1;
                match &self.factors {
                    None => own.push(tile),
                    Some(factors) => own.extend(factors.join(&tile)),
                }
            }
        }
        Ok(stored)
    }

    /// Each region, or the box around it in the dims of the tensor, and the files that hold it.
    pub(crate) fn shards(&self) -> Vec<(Region, Vec<u32>)> {
        let shard = |(region, places): (&Region, &Vec<Place>)| {
            let around = self.factors.as_ref().map(|factors| factors.around(region));
            let files = places
                .iter()
                .map(|place| self.tensors[place.tensor as usize].file);
            (around.unwrap_or_else(|| region.clone()), files.collect())
        };
        self.regions.iter().zip(&self.places).map(shard).collect()
    }

    pub(crate) fn over(&self, wanted: &Region) -> std::ops::Range<usize> {
        if wanted.rank() == 0 {
            return 0..self.regions.len();
        }
        let (start, end) = (wanted.offset()[self.dim], wanted.end(self.dim));
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
        if covered == u128::from(whole.n_elements()) && prove_disjoint(&self.regions).is_ok() {
            return Ok(());
        }
        let mut holes = vec![whole];
        for region in &self.regions {
            holes = holes
                .iter()
                .flat_map(|hole| hole.subtract(region))
                .collect();
            if holes.len() > 1 << 16 {
                let message = format!(
                    "{}: its {} tiles are too irregular to prove",
                    named(&stored.key),
                    self.regions.len()
                );
                return Err(Error::new(Kind::Unsupported, message).key(&stored.key));
            }
        }
        holes
            .first()
            .map_or(Ok(()), |hole| Err(self.uncovered(stored, hole)))
    }

    fn uncovered(&self, stored: &Stored, hole: &Region) -> Error {
        let factors = self.factors.as_ref();
        let hole = factors.map_or_else(|| hole.clone(), |factors| factors.first_run(hole));
        let message = format!(
            "the stored shards of {} leave {hole} uncovered",
            named(&stored.key)
        );
        let hint = format!(
            "{} regions of it are stored; a shard file is missing or its description is incomplete",
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

    /// `select`, of a tile in the dims of the regions.
    fn select_box<'a>(
        &'a self,
        stored: &'a Stored,
        tile: &Tile,
        chosen: &mut [u64],
        selected: &mut Vec<SelectedCopy<'a>>,
    ) -> Result<()> {
        // What is still wanted shrinks by each region that is used: overlapping replicas give every element once.
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
            for wanted in rest {
                let Some(common) = wanted.intersect(region) else {
                    left.push(wanted);
                    continue;
                };
                left.extend(wanted.subtract(&common));
                let files: Vec<u32> = self.places[i]
                    .iter()
                    .take(MAX_CANDIDATES as usize)
                    .map(|p| self.tensors[p.tensor as usize].file)
                    .collect();
                let file = choose(&files, chosen, common.n_elements())
                    .expect("a region is stored somewhere");
                let place = self.places[i]
                    .iter()
                    .find(|p| self.tensors[p.tensor as usize].file == file)
                    .expect("chosen of them");
                let tensor = &self.tensors[place.tensor as usize];
                let source = Tile {
                    global: region.clone(),
                    local_offset: place.local_offset,
                    local_strides: place.local_strides.clone(),
                };
                let shape = tensor.shape.clone();
                selected.push(selected_copy(
                    file,
                    &tensor.name,
                    shape,
                    common,
                    source,
                    tile,
                ));
            }
            rest = left;
        }
        rest.first()
            .map_or(Ok(()), |hole| Err(self.uncovered(stored, hole)))
    }
}

/// Refuses regions that overlap. They are split along one dim after the other into groups that touch; a group that no
/// dim splits further is compared pair by pair.
fn prove_disjoint(regions: &[Region]) -> Result<()> {
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
                        "stored regions {a} and {b} overlap in {common} and are no replicas of each other"
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
        "the stored tiles are too irregular to prove that they do not overlap",
    )
}

/// The file of the least bytes so far; it gets the new ones.
fn choose(files: &[u32], chosen: &mut [u64], n: u64) -> Option<u32> {
    let file = files
        .iter()
        .copied()
        .min_by_key(|&file| chosen[file as usize])?;
    chosen[file as usize] += n;
    Some(file)
}

fn selected_copy<'a>(
    file: u32,
    name: &'a str,
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
        boxes: Boxes { common, source, to },
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
