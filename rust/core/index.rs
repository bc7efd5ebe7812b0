//! Which shard is where, and from that the plan of a request.
//!
//! For each key the index keeps the stored tiles in one of two forms. A *grid* is symbolic: per dim where it is cut,
//! and for a cell of the grid who holds it, either the ranks of a mesh (whose files are known by rank) or a table. It is
//! proven cut by cut and intersected dim by dim, so that it costs the same for sixteen ranks and sixteen thousand.
//! Everything irregular is a list of *explicit tiles*, sorted, proven disjoint by a sweep.
//!
//! Files are opened when a plan first needs them, and a plan keeps the opened files that it uses: what was checked is
//! what is read.

use crate::copy::can_cast;
use crate::dtype::{Dtype, n_elements};
use crate::error::{Error, Kind, Printable, Result};
use crate::layout::{Cuts, FlatSpan, Layout};
use crate::metadata::Metadata;
use crate::plan::{Array, Piece, Plan, PlanSource, piece_of};
use crate::region::{Dims, Region, row_major_strides};
use crate::shard_file::ShardFile;
use crate::source::{Method, closed};
use crate::tile::Tile;
use rayon::prelude::*;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

/// Holders of one shard that are weighed against each other; beyond that the choice gains nothing.
const MAX_CANDIDATES: u64 = 16;
/// Work bound of the proof that explicit tiles are disjoint, per tile: real layouts need a few steps.
const MAX_SWEEP_STEPS: u64 = 4096;

/// Files and stored tensors.
#[derive(Debug, Default)]
pub struct Index {
    files: Vec<FileSlot>,
    tensors: Vec<Stored>,
    by_key: HashMap<String, u32>,
    is_closed: std::sync::atomic::AtomicBool,
}

#[derive(Debug)]
struct FileSlot {
    path: PathBuf,
    follow_links: bool,
    method: Method,
    opened: Mutex<Option<Arc<ShardFile>>>,
}

#[derive(Debug)]
struct Stored {
    key: String,
    shape: Vec<u64>,
    /// Known from the caller, or from the first shard file that was asked.
    dtype: OnceLock<Dtype>,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Grid(Grid),
    Tiles(Tiles),
}

#[derive(Debug)]
struct Grid {
    cuts: Vec<Cuts>,
    /// `order[j]` is the global dim at storage position `j`.
    order: Vec<usize>,
    holders: Holders,
}

#[derive(Debug)]
enum Holders {
    /// One file that holds the whole.
    File(u32),
    /// The ranks of a mesh: file of each position.
    Mesh(Arc<Layout>, Arc<[u32]>),
    /// For each cell, row-major: `files[starts[cell]..starts[cell + 1]]`.
    Table { starts: Vec<u32>, files: Vec<u32> },
}

/// Explicit tiles of one key.
#[derive(Debug)]
struct Tiles {
    /// Distinct regions, sorted by their offset in `dim`.
    regions: Vec<Region>,
    /// For each region the places where it is stored.
    places: Vec<Vec<Place>>,
    tensors: Vec<StoredTensor>,
    dim: usize,
    /// Largest end in `dim` of the regions up to here.
    max_end: Vec<u64>,
}

#[derive(Debug)]
struct Place {
    tensor: u32,
    local_offset: u64,
    local_strides: Vec<u64>,
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

/// One wanted array, by regions of keys.
#[derive(Debug)]
pub struct Wanted {
    name: String,
    shape: Vec<u64>,
    tiles: Vec<(String, Tile)>,
    padding: Vec<(u64, u64)>,
    /// Keys that it is made of and the global shapes that the request takes for granted.
    keys: Vec<(String, Option<Vec<u64>>)>,
}

/// The local arrays that a load or a file wants.
#[derive(Debug, Default)]
pub struct Request {
    arrays: Vec<Wanted>,
}

impl Request {
    /// Number of arrays.
    pub fn len(&self) -> usize {
        self.arrays.len()
    }

    /// Whether nothing is wanted.
    pub fn is_empty(&self) -> bool {
        self.arrays.is_empty()
    }

    /// The part of `key` that the rank at a position of the layout's mesh holds.
    pub fn add(&mut self, name: &str, key: &str, layout: &Layout, position: u64) -> Result<()> {
        if !layout.holds(position) {
            let message = format!(
                "rank {} holds no part of `{}`",
                layout.mesh().rank_at(position),
                Printable(key)
            );
            return Err(Error::new(Kind::Argument, message).key(key));
        }
        let tiles = layout.tiles(position);
        let shape = layout.local_shape(position);
        let filled: u64 = tiles.iter().map(|tile| tile.global.n_elements()).sum();
        let n: u64 = shape.iter().product();
        self.arrays.push(Wanted {
            name: name.to_owned(),
            shape,
            tiles: tiles
                .into_iter()
                .map(|tile| (key.to_owned(), tile))
                .collect(),
            padding: if filled < n {
                vec![(filled, n)]
            } else {
                Vec::new()
            },
            keys: vec![(key.to_owned(), Some(layout.shape().to_vec()))],
        });
        Ok(())
    }

    /// A box of `key`.
    pub fn add_region(&mut self, name: &str, key: &str, region: Region) {
        let shape = region.shape().to_vec();
        let tile = Tile {
            local_offset: 0,
            local_strides: row_major_strides(&shape),
            global: region,
        };
        self.arrays.push(Wanted {
            name: name.to_owned(),
            shape,
            keys: vec![(key.to_owned(), None)],
            tiles: vec![(key.to_owned(), tile)],
            padding: Vec::new(),
        });
    }

    /// The part of a rank in the blocks of several keys laid end to end, each start rounded up to `align`.
    pub fn add_joined(
        &mut self,
        name: &str,
        members: &[(String, Arc<Layout>)],
        rank: u64,
        align: u64,
    ) -> Result<()> {
        let bad = |what: String| {
            Error::new(
                Kind::Layout,
                format!("joined array `{}`: {what}", Printable(name)),
            )
            .key(name)
        };
        let (_, first) = members.first().ok_or_else(|| bad("no keys".to_owned()))?;
        let axes = first
            .flat_axes()
            .ok_or_else(|| bad("its keys are not flat".to_owned()))?;
        let position = first.mesh().position(rank)?;
        if align == 0 {
            return Err(bad("`align` is 0; at least 1 is needed".to_owned()));
        }
        let (mut end, mut starts) = (0_u64, Vec::new());
        for (key, layout) in members {
            if layout.flat_axes() != Some(axes)
                || layout.mesh() != first.mesh()
                || !layout.holds(position)
            {
                return Err(bad(format!(
                    "`{}` lies on other axes, or rank {rank} does not hold it",
                    Printable(key)
                )));
            }
            let n: u64 = layout.block_shape(position).iter().product();
            let start = end
                .checked_next_multiple_of(align)
                .ok_or_else(|| bad("is too long".to_owned()))?;
            end = start
                .checked_add(n)
                .filter(|end| *end < 1 << 62)
                .ok_or_else(|| bad("is too long".to_owned()))?;
            starts.push((start, n));
        }
        let parts = first.mesh().n_folded(axes);
        let unit = parts
            .checked_mul(align)
            .ok_or_else(|| bad("is too long".to_owned()))?;
        let total = end
            .checked_next_multiple_of(unit)
            .ok_or_else(|| bad("is too long".to_owned()))?;
        let part_len = total / parts;
        let own = first.mesh().fold(position, axes) * part_len;
        let mut wanted = Wanted {
            name: name.to_owned(),
            shape: vec![part_len],
            tiles: Vec::new(),
            padding: Vec::new(),
            keys: members
                .iter()
                .map(|(key, layout)| (key.clone(), Some(layout.shape().to_vec())))
                .collect(),
        };
        // Everything of the own part that lies in no block is padding.
        let mut gap_from = own;
        for ((key, layout), (start, n)) in members.iter().zip(starts) {
            let tiles = layout.tiles_in(position, FlatSpan { start, part_len });
            wanted
                .tiles
                .extend(tiles.into_iter().map(|tile| (key.clone(), tile)));
            let (from, to) = (
                start.clamp(own, own + part_len),
                (start + n).clamp(own, own + part_len),
            );
            if from < to {
                if gap_from < from {
                    wanted.padding.push((gap_from - own, from - own));
                }
                gap_from = to;
            }
        }
        if gap_from < own + part_len {
            wanted.padding.push((gap_from - own, part_len));
        }
        self.arrays.push(wanted);
        Ok(())
    }

    /// The array that was added last.
    pub fn last(&self) -> Option<&Wanted> {
        self.arrays.last()
    }
}

impl Wanted {
    /// Its shape.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Its tiles, each with its key.
    pub fn tiles(&self) -> &[(String, Tile)] {
        &self.tiles
    }
}

/// One copy of a plan before its file is opened.
#[derive(Debug)]
struct Needed<'a> {
    file: u32,
    name: &'a str,
    stored_shape: Vec<u64>,
    /// Element of the stored tensor.
    src: u64,
    piece: Piece,
}

impl Index {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// The index that a decoded `metadata.json` tells; its files lie in `folder`.
    pub fn from_metadata(metadata: &Metadata, folder: &Path, method: Method) -> Result<Self> {
        let mut index = Self::new();
        for name in &metadata.files {
            index.add_file(folder.join(name), false, method);
        }
        for tensor in &metadata.tensors {
            let cuts = tensor.shape.iter().zip(&tensor.fragmentations);
            let cuts = cuts
                .map(|(&extent, &n_parts)| Cuts::Even { extent, n_parts })
                .collect();
            let files = tensor.cells.holders.iter().map(|(file, _)| *file).collect();
            let holders = Holders::Table {
                starts: tensor.cells.starts.clone(),
                files,
            };
            let order = (0..tensor.shape.len()).collect();
            index.insert(
                &tensor.name,
                None,
                tensor.shape.clone(),
                Form::Grid(Grid {
                    cuts,
                    order,
                    holders,
                }),
            )?;
        }
        Ok(index)
    }

    /// Adds a shard file, to be opened when it is needed; its number.
    pub fn add_file(&mut self, path: PathBuf, follow_links: bool, method: Method) -> u32 {
        self.files.push(FileSlot {
            path,
            follow_links,
            method,
            opened: Mutex::new(None),
        });
        self.files.len() as u32 - 1
    }

    /// `key` lies whole in a file under its own name.
    pub fn add_whole(&mut self, key: &str, file: u32) -> Result<()> {
        let opened = self.open(file)?;
        let Some((dtype, shape, _)) = opened.tensor(key) else {
            return Err(self.missing_in(file, key));
        };
        let cuts = shape
            .iter()
            .map(|&extent| Cuts::Even { extent, n_parts: 1 })
            .collect();
        let order = (0..shape.len()).collect();
        let form = Form::Grid(Grid {
            cuts,
            order,
            holders: Holders::File(file),
        });
        self.insert(key, Some(dtype), shape, form)
    }

    /// `key` lies in the files of the ranks as a layout says, under its own name: one file a position.
    pub fn add_layout(
        &mut self,
        key: &str,
        dtype: Dtype,
        layout: &Arc<Layout>,
        files: &Arc<[u32]>,
    ) -> Result<()> {
        if files.len() as u64 != layout.mesh().n_points()
            || files.iter().any(|&f| f as usize >= self.files.len())
        {
            let message = format!(
                "{} files for a mesh of {} ranks, or unknown files",
                files.len(),
                layout.mesh().n_points()
            );
            return Err(Error::new(Kind::Argument, message).key(key));
        }
        if layout.is_grid() {
            let cuts = layout.dims().iter().map(|dim| dim.cuts.clone()).collect();
            let holders = Holders::Mesh(Arc::clone(layout), Arc::clone(files));
            let form = Form::Grid(Grid {
                cuts,
                order: layout.order().to_vec(),
                holders,
            });
            return self.insert(key, Some(dtype), layout.shape().to_vec(), form);
        }
        let mut stored = Vec::new();
        for position in layout.holders() {
            let tensor = StoredTensor {
                file: files[position as usize],
                name: key.to_owned(),
                shape: layout.local_shape(position),
            };
            stored.push((tensor, layout.tiles(position)));
        }
        self.add_tiles(key, dtype, layout.shape().to_vec(), stored, true)
    }

    /// `key` consists of explicit tiles. Equal regions are replicas; other overlaps are refused unless `overlapping`.
    pub fn add_tiles(
        &mut self,
        key: &str,
        dtype: Dtype,
        shape: Vec<u64>,
        stored: Vec<(StoredTensor, Vec<Tile>)>,
        overlapping: bool,
    ) -> Result<()> {
        let tiles = Tiles::new(&shape, stored, self.files.len(), overlapping)
            .map_err(|error| error.key(key).within(named(key)))?;
        self.insert(key, Some(dtype), shape, Form::Tiles(tiles))
    }

    fn insert(
        &mut self,
        key: &str,
        dtype: Option<Dtype>,
        shape: Vec<u64>,
        form: Form,
    ) -> Result<()> {
        if self
            .by_key
            .insert(key.to_owned(), self.tensors.len() as u32)
            .is_some()
        {
            return Err(Error::damaged(format!("{} is stored twice", named(key))).key(key));
        }
        if n_elements(&shape).is_none_or(|n| n > i64::MAX as u64) {
            return Err(Error::damaged(format!(
                "{}: shape {} is too large",
                named(key),
                Dims(&shape)
            ))
            .key(key));
        }
        let dtype = dtype.map_or_else(OnceLock::new, OnceLock::from);
        self.tensors.push(Stored {
            key: key.to_owned(),
            shape,
            dtype,
            form,
        });
        Ok(())
    }

    /// Keys in the order in which they were added.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.key.as_str())
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Whether there is a key.
    pub fn contains(&self, key: &str) -> bool {
        self.by_key.contains_key(key)
    }

    /// Number of files.
    pub fn n_files(&self) -> usize {
        self.files.len()
    }

    /// Path of a file.
    pub fn file_path(&self, file: u32) -> Result<&Path> {
        Ok(&self.slot(file)?.path)
    }

    fn slot(&self, file: u32) -> Result<&FileSlot> {
        self.files
            .get(file as usize)
            .ok_or_else(|| Error::new(Kind::Argument, format!("there is no file {file}")))
    }

    /// Opens a file, or gives the one that is open.
    pub fn open(&self, file: u32) -> Result<Arc<ShardFile>> {
        let slot = self.slot(file)?;
        let mut opened = slot
            .opened
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if self.is_closed.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(closed());
        }
        if let Some(opened) = &*opened {
            return Ok(Arc::clone(opened));
        }
        let shard_file = Arc::new(ShardFile::open(&slot.path, slot.follow_links, slot.method)?);
        *opened = Some(Arc::clone(&shard_file));
        Ok(shard_file)
    }

    /// Lets go of the files; plans that were made keep theirs.
    pub fn close(&self) {
        self.is_closed
            .store(true, std::sync::atomic::Ordering::Relaxed);
        for slot in &self.files {
            *slot
                .opened
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner) = None;
        }
    }

    fn stored(&self, key: &str) -> Result<&Stored> {
        self.by_key
            .get(key)
            .map(|&i| &self.tensors[i as usize])
            .ok_or_else(|| {
                Error::new(Kind::Key, format!("there is no tensor {}", named(key))).key(key)
            })
    }

    /// dtype and global shape of a key.
    pub fn info(&self, key: &str) -> Result<(Dtype, &[u64])> {
        let stored = self.stored(key)?;
        Ok((self.dtype(stored)?, &stored.shape))
    }

    /// Global shape of a key; opens nothing.
    pub fn shape(&self, key: &str) -> Result<&[u64]> {
        Ok(&self.stored(key)?.shape)
    }

    /// The files that hold a part of a key, each once, ascending; opens nothing.
    pub fn holders(&self, key: &str) -> Result<Vec<u32>> {
        let mut files: Vec<u32> = match &self.stored(key)?.form {
            Form::Grid(Grid {
                holders: Holders::File(file),
                ..
            }) => vec![*file],
            Form::Grid(Grid {
                holders: Holders::Table { files, .. },
                ..
            }) => files.clone(),
            Form::Grid(Grid {
                holders: Holders::Mesh(layout, files),
                ..
            }) => layout
                .holders()
                .map(|position| files[position as usize])
                .collect(),
            Form::Tiles(tiles) => tiles.tensors.iter().map(|tensor| tensor.file).collect(),
        };
        files.sort_unstable();
        files.dedup();
        Ok(files)
    }

    fn dtype(&self, stored: &Stored) -> Result<Dtype> {
        if let Some(dtype) = stored.dtype.get() {
            return Ok(*dtype);
        }
        let Form::Grid(Grid {
            holders: Holders::Table { files, .. },
            ..
        }) = &stored.form
        else {
            unreachable!("only tensors of a table come without a dtype")
        };
        let Some(&file) = files.first() else {
            return Err(no_holder(&stored.key, &Region::whole(&stored.shape)));
        };
        let opened = self.open(file)?;
        let (dtype, ..) = opened
            .tensor(&stored.key)
            .ok_or_else(|| self.missing_in(file, &stored.key))?;
        Ok(*stored.dtype.get_or_init(|| dtype))
    }

    /// Every stored region of a key and the files that hold it.
    pub fn shards(&self, key: &str) -> Result<Vec<(Region, Vec<u32>)>> {
        let stored = self.stored(key)?;
        match &stored.form {
            Form::Grid(grid) => (0..grid.n_cells())
                .map(|cell| grid.region(cell))
                .enumerate()
                .filter(|(_, region)| !region.is_empty() || grid.n_cells() == 1)
                .map(|(cell, region)| Ok((region, grid.files(cell as u64, u64::MAX))))
                .collect(),
            Form::Tiles(tiles) => {
                let files = |places: &[Place]| {
                    places
                        .iter()
                        .map(|p| tiles.tensors[p.tensor as usize].file)
                        .collect()
                };
                Ok(tiles
                    .regions
                    .iter()
                    .cloned()
                    .zip(tiles.places.iter().map(|p| files(p)))
                    .collect())
            }
        }
    }

    /// Proves that the stored regions of every key cover it without hole or overlap.
    pub fn prove(&self) -> Result<()> {
        self.tensors
            .par_iter()
            .try_for_each(|stored| match &stored.form {
                Form::Grid(grid) => grid.prove(stored),
                Form::Tiles(tiles) => tiles.prove(stored),
            })
    }

    /// Opens every file that holds a tensor and checks that it is as the index expects; `(file, name)` of what nobody expects.
    pub fn check(&self) -> Result<Vec<(u32, String)>> {
        self.prove()?;
        let mut expected: Vec<Vec<(&Stored, &str, Vec<u64>)>> =
            (0..self.files.len()).map(|_| Vec::new()).collect();
        for stored in &self.tensors {
            match &stored.form {
                Form::Grid(grid) => {
                    for cell in 0..grid.n_cells() {
                        let region = grid.region(cell);
                        let shape: Vec<u64> =
                            grid.order.iter().map(|&d| region.shape()[d]).collect();
                        for file in grid.files(cell, u64::MAX) {
                            expected[file as usize].push((stored, &stored.key, shape.clone()));
                        }
                    }
                }
                Form::Tiles(tiles) => {
                    for tensor in &tiles.tensors {
                        expected[tensor.file as usize].push((
                            stored,
                            &tensor.name,
                            tensor.shape.clone(),
                        ));
                    }
                }
            }
        }
        let unlisted: Vec<Vec<(u32, String)>> = expected
            .into_par_iter()
            .enumerate()
            .filter(|(_, expected)| !expected.is_empty())
            .map(|(file, expected)| {
                let file = file as u32;
                let opened = self.open(file)?;
                let mut is_known = vec![false; opened.header().len()];
                for (stored, name, shape) in expected {
                    let at = opened
                        .header()
                        .find(name)
                        .ok_or_else(|| self.missing_in(file, name))?;
                    is_known[at] = true;
                    let entry = opened.header().entry(at);
                    let dtype = *stored.dtype.get_or_init(|| entry.dtype);
                    self.check_stored(file, name, (entry.dtype, &entry.shape), (dtype, &shape))?;
                }
                let unlisted = is_known.iter().enumerate().filter(|(_, known)| !**known);
                Ok(unlisted
                    .map(|(i, _)| (file, opened.header().entry(i).name.to_owned()))
                    .collect())
            })
            .collect::<Result<_>>()?;
        Ok(unlisted.into_iter().flatten().collect())
    }

    fn check_stored(
        &self,
        file: u32,
        name: &str,
        found: (Dtype, &[u64]),
        expected: (Dtype, &[u64]),
    ) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        let message = format!(
            "{} in {}: {} {} was expected, {} {} was found",
            named(name),
            self.files[file as usize].path.display(),
            expected.0,
            Dims(expected.1),
            found.0,
            Dims(found.1),
        );
        Err(Error::new(Kind::Mismatch, message)
            .key(name)
            .path(&self.files[file as usize].path))
    }

    fn missing_in(&self, file: u32, name: &str) -> Error {
        let path = &self.files[file as usize].path;
        Error::damaged(format!(
            "{} does not hold {}, which should be there",
            path.display(),
            named(name)
        ))
        .key(name)
        .path(path)
    }

    /// The checked plan of a request. `cast`: floating-point tensors are cast to it, others stay as they are.
    pub fn plan(&self, request: &Request, cast: Option<Dtype>) -> Result<Plan<'static>> {
        if self.is_closed.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(closed());
        }
        // Shapes and keys of everything first: nothing is opened for a request that cannot be met.
        for wanted in &request.arrays {
            self.check_wanted(wanted)?;
        }
        let mut chosen_bytes = vec![0; self.files.len()];
        let mut plan = Plan::default();
        let mut sources: HashMap<u32, u32> = HashMap::new();
        for wanted in &request.arrays {
            let (first_key, _) = &wanted.keys[0];
            let stored_dtype = self.dtype(self.stored(first_key)?)?;
            for (key, _) in &wanted.keys[1..] {
                let dtype = self.dtype(self.stored(key)?)?;
                if dtype != stored_dtype {
                    let message = format!(
                        "`{}` joins {} of {stored_dtype} and {} of {dtype}; one dtype is needed",
                        Printable(&wanted.name),
                        named(first_key),
                        named(key),
                    );
                    return Err(Error::new(Kind::Mismatch, message).key(key));
                }
            }
            let dtype = cast_target(stored_dtype, cast)
                .map_err(|error| error.key(first_key).within(named(first_key)))?;
            let mut pieces = Vec::new();
            for needed in self.select(wanted, &mut chosen_bytes)? {
                let Needed {
                    file,
                    name,
                    stored_shape,
                    src,
                    mut piece,
                } = needed;
                let opened = self.open(file)?;
                let (found, shape, start) = opened
                    .tensor(name)
                    .ok_or_else(|| self.missing_in(file, name))?;
                self.check_stored(file, name, (found, &shape), (stored_dtype, &stored_shape))?;
                piece.source = *sources.entry(file).or_insert_with(|| {
                    plan.sources.push(PlanSource::File(file, opened.clone()));
                    plan.sources.len() as u32 - 1
                });
                let (per_unit, unit_bytes) = stored_dtype.unit();
                if !src.is_multiple_of(per_unit) {
                    let message = format!(
                        "a cut of {} ({stored_dtype}) does not fall on whole bytes",
                        named(name)
                    );
                    return Err(Error::new(Kind::Unsupported, message).key(name));
                }
                piece.src_start_bytes = start + src / per_unit * unit_bytes;
                pieces.push(piece);
            }
            let array = Array::new(
                wanted.name.clone(),
                (stored_dtype, dtype),
                wanted.shape.clone(),
                pieces,
                wanted.padding.clone(),
            )?;
            plan.arrays.push(array);
        }
        Ok(plan)
    }

    /// How many pieces the plan of a request has, without opening a file: the symbolic part of planning alone.
    pub fn count_pieces(&self, request: &Request) -> Result<usize> {
        let mut chosen_bytes = vec![0; self.files.len()];
        request.arrays.iter().try_fold(0, |n, wanted| {
            self.check_wanted(wanted)?;
            Ok(n + self.select(wanted, &mut chosen_bytes)?.len())
        })
    }

    fn check_wanted(&self, wanted: &Wanted) -> Result<()> {
        for (key, shape) in &wanted.keys {
            let stored = self.stored(key)?;
            if let Some(shape) = shape
                && *shape != stored.shape
            {
                let message = format!(
                    "{} has shape {}, the layout was made for {}",
                    named(key),
                    Dims(&stored.shape),
                    Dims(shape)
                );
                return Err(Error::new(Kind::Mismatch, message).key(key));
            }
        }
        for (key, tile) in &wanted.tiles {
            let stored = self.stored(key)?;
            if !tile.global.lies_in(&stored.shape) {
                let message = format!(
                    "{} has shape {}; {} lies outside",
                    named(key),
                    Dims(&stored.shape),
                    tile.global
                );
                return Err(Error::new(Kind::Argument, message).key(key));
            }
        }
        Ok(())
    }

    /// The copies that make up an array: each wanted element once, replicas chosen so that files share the bytes.
    fn select<'a>(&'a self, wanted: &Wanted, chosen_bytes: &mut [u64]) -> Result<Vec<Needed<'a>>> {
        let mut needed = Vec::new();
        for (key, tile) in &wanted.tiles {
            if tile.global.is_empty() {
                continue;
            }
            let stored = self.stored(key)?;
            match &stored.form {
                Form::Grid(grid) => grid.select(stored, tile, chosen_bytes, &mut needed)?,
                Form::Tiles(tiles) => tiles.select(stored, tile, chosen_bytes, &mut needed)?,
            }
        }
        Ok(needed)
    }
}

impl Grid {
    fn n_cells(&self) -> u64 {
        self.cuts.iter().map(Cuts::n_parts).product()
    }

    /// The parts of a cell, one a dim, from its row-major number.
    fn parts(&self, mut cell: u64) -> Vec<u64> {
        let mut parts = vec![0; self.cuts.len()];
        for (part, cuts) in parts.iter_mut().zip(&self.cuts).rev() {
            *part = cell % cuts.n_parts();
            cell /= cuts.n_parts();
        }
        parts
    }

    fn region_of(&self, parts: &[u64]) -> Region {
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

    fn region(&self, cell: u64) -> Region {
        self.region_of(&self.parts(cell))
    }

    fn cell(&self, parts: &[u64]) -> u64 {
        self.cuts
            .iter()
            .zip(parts)
            .fold(0, |cell, (cuts, part)| cell * cuts.n_parts() + part)
    }

    /// Files that hold a cell; of many replicas an even sample of at most `max`.
    fn files(&self, cell: u64, max: u64) -> Vec<u32> {
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

    fn prove(&self, stored: &Stored) -> Result<()> {
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

    fn select<'a>(
        &self,
        stored: &'a Stored,
        tile: &Tile,
        chosen: &mut [u64],
        needed: &mut Vec<Needed<'a>>,
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
                    .ok_or_else(|| no_holder(&stored.key, &region))?;
                let stored_shape: Vec<u64> =
                    self.order.iter().map(|&d| region.shape()[d]).collect();
                let storage = row_major_strides(&stored_shape);
                let mut strides = vec![0; stored_shape.len()];
                for (j, &d) in self.order.iter().enumerate() {
                    strides[d] = storage[j];
                }
                let source = Tile {
                    global: region,
                    local_offset: 0,
                    local_strides: strides,
                };
                needed.push(needed_piece(
                    file,
                    &stored.key,
                    stored_shape,
                    &common,
                    &source,
                    tile,
                ));
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
    fn new(
        shape: &[u64],
        stored: Vec<(StoredTensor, Vec<Tile>)>,
        n_files: usize,
        overlapping: bool,
    ) -> Result<Self> {
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
            regions,
            places,
            tensors,
            dim,
            max_end,
        })
    }

    fn over(&self, wanted: &Region) -> std::ops::Range<usize> {
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

    fn prove(&self, stored: &Stored) -> Result<()> {
        if n_elements(&stored.shape) == Some(0) {
            return Ok(());
        }
        let whole = Region::whole(&stored.shape);
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

    fn select<'a>(
        &'a self,
        stored: &'a Stored,
        tile: &Tile,
        chosen: &mut [u64],
        needed: &mut Vec<Needed<'a>>,
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
                needed.push(needed_piece(
                    file,
                    &tensor.name,
                    tensor.shape.clone(),
                    &common,
                    &source,
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

fn needed_piece<'a>(
    file: u32,
    name: &'a str,
    stored_shape: Vec<u64>,
    common: &Region,
    source: &Tile,
    wanted: &Tile,
) -> Needed<'a> {
    let at = (source.local_at(common.offset()), &source.local_strides[..]);
    let to = (wanted.local_at(common.offset()), &wanted.local_strides[..]);
    let (src, dst, dims) = piece_of(common, at, to);
    Needed {
        file,
        name,
        stored_shape,
        src,
        piece: Piece {
            source: 0,
            src_start_bytes: 0,
            dst,
            dims,
        },
    }
}

fn cast_target(stored: Dtype, cast: Option<Dtype>) -> Result<Dtype> {
    let Some(cast) = cast else { return Ok(stored) };
    let is_float = !matches!(
        stored,
        Dtype::Bool
            | Dtype::U8
            | Dtype::I8
            | Dtype::I16
            | Dtype::U16
            | Dtype::I32
            | Dtype::U32
            | Dtype::I64
            | Dtype::U64
    );
    if !is_float {
        return Ok(stored);
    }
    if !can_cast(stored, cast) {
        return Err(Error::new(
            Kind::Unsupported,
            format!("a cast from {stored} to {cast} is not offered"),
        )
        .hint(
            "F64, F32, F16 and BF16 are cast to each other; leave such tensors out with `keys=`",
        ));
    }
    Ok(cast)
}

fn no_holder(key: &str, region: &Region) -> Error {
    let message = format!(
        "the stored shards of {} leave {region} uncovered",
        named(key)
    );
    Error::new(Kind::Coverage, message).key(key)
}

fn named(key: &str) -> String {
    format!("`{}`", Printable(key))
}
