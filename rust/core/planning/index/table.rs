//! The table of an index: its keys, and where each part of a tensor is stored.

use super::Index;
use crate::error::{Error, Kind, Result};
use crate::files::header::Entry;
use crate::files::local_array::{LocalArray, Part};
use crate::files::shard_file::Table;
use crate::geometry::dtype::Dtype;
use crate::geometry::joined::Joined;
use crate::geometry::layout::{Cuts, Layout};
use crate::geometry::region::{Dims, Region};
use crate::geometry::tile::Tile;
use crate::planning::divided::Divided;
use crate::planning::factors::Factors;
use crate::planning::flat::{Flat, Lines, Piece};
use crate::planning::stored::{
    Form, Grid, Holders, Stored, StoredTensor, Tiles, ZEROS, arrays_of_divided, arrays_of_flat,
    in_order, named, no_holder,
};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// A file whose tensors are all in the index. Each is stored completely in the file, under its key.
///
/// A file can have a million tensors. The index holds nothing per tensor: it uses the table of the file.
#[derive(Debug)]
pub(super) struct WholeFile {
    pub(super) file: u32,
    pub(super) table: Arc<Table>,
    /// Number of entries of `tensors` that come before these.
    pub(super) n_before: usize,
}

/// A tensor of the index.
pub(super) enum Found<'a> {
    Listed(&'a Stored),
    InWholeFile(u32, Entry<'a>),
}

impl<'a> Found<'a> {
    pub(super) fn name(&self) -> &'a str {
        match self {
            Self::Listed(stored) => &stored.key,
            Self::InWholeFile(_, entry) => entry.name,
        }
    }

    /// The files that hold all of it, in row-major order; `None` if it is stored otherwise.
    pub(super) fn only_files(&self) -> Option<&[u32]> {
        match self {
            Self::InWholeFile(file, _) => Some(std::slice::from_ref(file)),
            Self::Listed(stored) => stored.only_cell(),
        }
    }

    /// The file that holds it completely, if there is one and no other.
    pub(super) fn only_file(&self) -> Option<u32> {
        match self {
            Self::Listed(stored) => match &stored.form {
                Form::Grid(grid) => grid.only_file(&stored.shape),
                Form::Tiles(_) | Form::Flat(_) | Form::Divided(_) => None,
            },
            Self::InWholeFile(file, _) => Some(*file),
        }
    }

    pub(super) fn shape(&self) -> &[u64] {
        match self {
            Self::Listed(stored) => &stored.shape,
            Self::InWholeFile(_, entry) => &entry.shape,
        }
    }
}

/// The place in the index behind the tensor that was found last.
#[derive(Default)]
pub(super) struct Near {
    /// Among the tensors that were added one by one.
    pub(super) listed: usize,
    /// The file of which the tensors were added together, and the tensor in it.
    pub(super) file: usize,
    pub(super) in_file: usize,
}

impl Index {
    /// The files as a table that tensors share: that of the last tensor, if it has the same.
    #[must_use]
    pub fn shared_files(&self, files: Vec<u32>) -> Arc<[u32]> {
        let last = self.last_files.as_ref();
        last.filter(|last| ***last == *files)
            .map_or_else(|| files.into(), Arc::clone)
    }

    /// Whether these are files of the index, from which no file is ever removed.
    fn are_files(&mut self, files: &Arc<[u32]>) -> bool {
        let is_last = |last: &Arc<[u32]>| Arc::ptr_eq(last, files);
        if self.last_files.as_ref().is_some_and(is_last) {
            return true;
        }
        let are_files = files.iter().all(|&file| (file as usize) < self.files.len());
        if are_files {
            self.last_files = Some(Arc::clone(files));
        }
        are_files
    }

    /// Adds a tensor that is stored completely in one file, under its key, in one or several parts.
    pub fn add_whole(&mut self, key: &str, file: u32) -> Result<()> {
        let opened = self.open(file)?;
        if let Some(array) = opened.table().split(key) {
            let LocalArray {
                dtype,
                shape,
                parts,
                ..
            } = array;
            let stored = parts.into_iter().map(|part| {
                let Part { name, shape, tiles } = part;
                (StoredTensor { file, name, shape }, tiles)
            });
            return self.add_tiles(key, dtype, shape, BTreeMap::new(), stored.collect(), false);
        }
        let Some((dtype, shape, _)) = opened.tensor(key) else {
            return Err(self.missing_in(file, key));
        };
        let form = Form::Grid(Grid::whole(&shape, file));
        self.insert(key, Some(dtype), shape, form)
    }

    /// Adds all tensors of a file, in the order of their data. Each is stored completely in the file, under its key.
    pub fn add_whole_file(&mut self, file: u32) -> Result<()> {
        let opened = self.open(file)?;
        let table = Arc::clone(opened.table());
        if table.has_splits() {
            for array in table.arrays() {
                self.add_whole(&array.name, file)?;
            }
            return Ok(());
        }
        for i in 0..table.len() {
            let entry = table.entry(i);
            check_size(entry.name, &entry.shape)?;
            if self.contains(entry.name) {
                return Err(stored_twice(entry.name));
            }
        }
        let n_before = self.tensors.len();
        self.whole_files.push(WholeFile {
            file,
            table,
            n_before,
        });
        Ok(())
    }

    /// Adds a tensor that is stored in the files of the ranks by a layout, under its key: one file per position.
    pub fn add_layout(
        &mut self,
        key: &str,
        dtype: Dtype,
        layout: &Arc<Layout>,
        files: &Arc<[u32]>,
    ) -> Result<()> {
        if files.len() as u64 != layout.mesh().n_points() || !self.are_files(files) {
            let message = format!(
                "{} files were given for a mesh of {} ranks, or a file is unknown",
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
                order: layout.order().to_vec().into(),
                holders,
            });
            return self.insert(key, Some(dtype), layout.shape().to_vec(), form);
        }
        let form = Form::Divided(Divided::alone(layout, files));
        self.insert(key, Some(dtype), layout.shape().to_vec(), form)
    }

    /// Adds the tensors of a joined array, of which each rank has its part in its file: one file per position.
    pub fn add_joined(
        &mut self,
        dtype: Dtype,
        joined: &Arc<Joined>,
        files: &Arc<[u32]>,
    ) -> Result<()> {
        if files.len() as u64 != joined.mesh().n_points() || !self.are_files(files) {
            let message = format!(
                "{} files were given for a mesh of {} ranks, or a file is unknown",
                files.len(),
                joined.mesh().n_points()
            );
            return Err(Error::new(Kind::Argument, message).key(joined.name()));
        }
        for (number, (key, layout)) in (0..).zip(joined.keys()) {
            let form = Form::Divided(Divided::joined(joined, number, files));
            self.insert(key.as_str(), Some(dtype), layout.shape().to_vec(), form)?;
        }
        Ok(())
    }

    /// Adds a tensor that is partitioned into `n_parts` equal parts along each dim. The files of cell `i`, row-major
    /// over the parts, are `files[starts[i]..starts[i + 1]]`. The dtype is read from the first file that is opened.
    pub fn add_table(
        &mut self,
        key: impl AsRef<str> + Into<Arc<str>>,
        shape: &[u64],
        n_parts: &[u64],
        starts: impl Into<Arc<[u32]>>,
        files: impl Into<Arc<[u32]>>,
    ) -> Result<()> {
        let (starts, files): (Arc<[u32]>, Arc<[u32]>) = (starts.into(), files.into());
        let n_cells = n_parts
            .iter()
            .try_fold(1_u64, |n, &parts| n.checked_mul(parts));
        let is_table = shape.len() == n_parts.len()
            && n_cells.and_then(|n| n.checked_add(1)) == Some(starts.len() as u64)
            && starts.is_sorted()
            && starts
                .last()
                .is_some_and(|&end| end as usize == files.len())
            && self.are_files(&files);
        if !is_table {
            let message = format!(
                "{}: the table of files does not match the parts",
                named(key.as_ref())
            );
            return Err(Error::new(Kind::Argument, message).key(key.as_ref()));
        }
        let cuts = shape.iter().zip(n_parts);
        let cuts = cuts
            .map(|(&extent, &n_parts)| Cuts::Even { extent, n_parts })
            .collect();
        let form = Form::Grid(Grid {
            cuts,
            order: in_order(shape.len()),
            holders: Holders::Table { starts, files },
        });
        self.insert(key, None, shape.to_vec(), form)
    }

    /// Adds a tensor whose parts form a grid, each stored in one file under its [`cell_name`](super::cell_name).
    ///
    /// # Errors
    /// The bounds of a dim do not begin with 0 or do not grow, or there is not one file for each cell.
    pub fn add_grid(
        &mut self,
        key: &str,
        dtype: Dtype,
        bounds: Vec<Vec<u64>>,
        files: Box<[u32]>,
    ) -> Result<()> {
        let is_grid = n_cells(&bounds) == Some(files.len())
            && files.iter().all(|&file| (file as usize) < self.files.len());
        let shape = is_grid.then(|| shape_of(&bounds)).flatten();
        let shape = shape.ok_or_else(|| no_grid(key))?;
        let form = Form::Grid(Grid {
            order: in_order(shape.len()),
            cuts: bounds.into_iter().map(Cuts::Listed).collect(),
            holders: Holders::Cells(files),
        });
        self.insert(key, Some(dtype), shape, form)
    }

    /// Adds a tensor whose parts form a grid. The files of cell `i`, row-major, are `files[starts[i]..starts[i + 1]]`, each
    /// with the complete cell under the key.
    ///
    /// # Errors
    /// The bounds of a dim do not begin with 0 or do not grow, or a cell has no file.
    pub fn add_cells(
        &mut self,
        key: &str,
        dtype: Dtype,
        bounds: Vec<Vec<u64>>,
        starts: &Arc<[u32]>,
        files: &Arc<[u32]>,
    ) -> Result<()> {
        let n_cells = n_cells(&bounds).and_then(|n| n.checked_add(1));
        let is_grid = n_cells == Some(starts.len())
            && starts.is_sorted_by(|a, b| a < b)
            && starts[0] == 0
            && starts[starts.len() - 1] as usize == files.len()
            && self.are_files(files);
        let shape = is_grid.then(|| shape_of(&bounds)).flatten();
        let shape = shape.ok_or_else(|| no_grid(key))?;
        let form = Form::Grid(Grid {
            order: in_order(shape.len()),
            cuts: bounds.into_iter().map(Cuts::of).collect(),
            holders: Holders::Table {
                starts: Arc::clone(starts),
                files: Arc::clone(files),
            },
        });
        self.insert(key, Some(dtype), shape, form)
    }

    /// Adds a tensor by explicit tiles. Equal regions are replicas; other overlaps are an error unless `overlapping`.
    ///
    /// A dim with `factors` is several dims in the tiles: with `[n0, n1]`, index `r` of the dim is `(r / n1, r % n1)`.
    pub fn add_tiles(
        &mut self,
        key: &str,
        dtype: Dtype,
        shape: Vec<u64>,
        factors: BTreeMap<usize, Vec<u64>>,
        stored: Vec<(StoredTensor, Vec<Tile>)>,
        overlapping: bool,
    ) -> Result<()> {
        let tiles = Factors::new(&shape, factors)
            .and_then(|factors| Tiles::new(&shape, factors, stored, self.files.len(), overlapping))
            .map_err(|error| error.key(key).within(named(key)))?;
        self.insert(key, Some(dtype), shape, Form::Tiles(Box::new(tiles)))
    }

    /// Adds a tensor that lies in flat arrays, from an element of their lines on.
    pub fn add_flat(
        &mut self,
        key: &str,
        dtype: Dtype,
        shape: Vec<u64>,
        lines: &Arc<Lines>,
        start: u64,
    ) -> Result<()> {
        let n_files = self.files.len() as u64;
        if let Some(file) = lines.last_file().filter(|&file| u64::from(file) >= n_files) {
            let message = format!("there is no file {file}");
            return Err(Error::new(Kind::Argument, message).key(key));
        }
        let flat = Flat::new(Arc::clone(lines), start, &shape)
            .map_err(|error| error.key(key).within(named(key)))?;
        self.insert(key, Some(dtype), shape, Form::Flat(flat))
    }

    /// Adds a tensor of an index whose files are the first ones of this index, in the same order.
    pub fn add_same(&mut self, key: &str, other: &Self, name: &str) -> Result<()> {
        if other.files.len() > self.files.len() {
            return Err(Error::new(Kind::Argument, "the index has other files").key(key));
        }
        let (dtype, shape) = other.info(name)?;
        if let Found::Listed(stored) = other.found(name)?
            && let Form::Flat(flat) = &stored.form
        {
            return self.insert(key, Some(dtype), shape, Form::Flat(flat.clone()));
        }
        // It was checked for overlaps before.
        let stored = other.stored_arrays(name)?;
        self.add_tiles(key, dtype, shape, BTreeMap::new(), stored, true)
    }

    /// Reserves memory for tensors that are added one by one.
    pub fn reserve(&mut self, n_tensors: usize) {
        self.tensors.reserve(n_tensors);
        self.by_key.reserve(n_tensors);
    }

    fn insert(
        &mut self,
        key: impl AsRef<str> + Into<Arc<str>>,
        dtype: Option<Dtype>,
        shape: Vec<u64>,
        form: Form,
    ) -> Result<()> {
        let is_in_file = self.is_in_whole_file(key.as_ref());
        let key: Arc<str> = key.into();
        match self.by_key.entry(Arc::clone(&key)) {
            std::collections::hash_map::Entry::Vacant(entry) if !is_in_file => {
                entry.insert(self.tensors.len() as u32);
            }
            _ => return Err(stored_twice(&key)),
        }
        check_size(&key, &shape)?;
        let dtype = dtype.map_or_else(OnceLock::new, OnceLock::from);
        self.tensors.push(Stored {
            key,
            shape,
            dtype,
            form,
        });
        Ok(())
    }

    /// Keys in the order in which they were added.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|i| self.key(i))
    }

    /// The key with a number, in the order in which they were added.
    pub fn key(&self, i: usize) -> Option<&str> {
        let mut n_in_whole_files = 0;
        for whole in &self.whole_files {
            let first = whole.n_before + n_in_whole_files;
            if i < first {
                break;
            }
            if i < first + whole.table.len() {
                return Some(whole.table.entry(i - first).name);
            }
            n_in_whole_files += whole.table.len();
        }
        let stored = self.tensors.get(i - n_in_whole_files)?;
        Some(&stored.key)
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        let in_whole_files: usize = self.whole_files.iter().map(|whole| whole.table.len()).sum();
        self.tensors.len() + in_whole_files
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there is a key.
    pub fn contains(&self, key: &str) -> bool {
        self.by_key.contains_key(key) || self.is_in_whole_file(key)
    }

    fn is_in_whole_file(&self, key: &str) -> bool {
        let mut tables = self.whole_files.iter().map(|whole| &whole.table);
        tables.any(|table| table.find(key).is_some())
    }

    /// The number of a key among those that were added one by one, in their order.
    pub fn number(&self, key: &str) -> Option<usize> {
        self.by_key.get(key).map(|&i| i as usize)
    }

    pub(super) fn found(&self, key: &str) -> Result<Found<'_>> {
        self.found_near(key, &mut Near::default())
    }

    /// As [`Self::found`]. Keys are often requested in the order of the index, and then no key is hashed.
    pub(super) fn found_near(&self, key: &str, near: &mut Near) -> Result<Found<'_>> {
        if let Some(stored) = self.tensors.get(near.listed)
            && *stored.key == *key
        {
            near.listed += 1;
            return Ok(Found::Listed(stored));
        }
        if let Some(&number) = self.by_key.get(key) {
            near.listed = number as usize + 1;
            return Ok(Found::Listed(&self.tensors[number as usize]));
        }
        for n in near.file..near.file + self.whole_files.len() {
            let n = n % self.whole_files.len();
            let whole = &self.whole_files[n];
            let at = if n == near.file { near.in_file } else { 0 };
            if let Some(i) = whole.table.find_near(key, at) {
                (near.file, near.in_file) = (n, i + 1);
                return Ok(Found::InWholeFile(whole.file, whole.table.entry(i)));
            }
        }
        Err(Error::new(Kind::Key, format!("there is no tensor {}", named(key))).key(key))
    }

    /// dtype and global shape of a key. Opens a file if the dtype is not known yet.
    pub fn info(&self, key: &str) -> Result<(Dtype, Vec<u64>)> {
        match self.found(key)? {
            Found::Listed(stored) => Ok((self.dtype(stored)?, stored.shape.clone())),
            Found::InWholeFile(_, entry) => Ok((entry.dtype, entry.shape)),
        }
    }

    /// Global shape of a key. Opens no file.
    pub fn shape(&self, key: &str) -> Result<Vec<u64>> {
        Ok(self.found(key)?.shape().to_vec())
    }

    /// The files that hold a part of a key, each once, ascending. Opens no file.
    pub fn holders(&self, key: &str) -> Result<Vec<u32>> {
        let stored = match self.found(key)? {
            Found::InWholeFile(file, _) => return Ok(vec![file]),
            Found::Listed(stored) => stored,
        };
        let mut files: Vec<u32> = match &stored.form {
            Form::Grid(Grid {
                holders: Holders::File(file),
                ..
            }) => vec![*file],
            Form::Grid(Grid {
                holders: Holders::Table { files, .. },
                ..
            }) => files.to_vec(),
            Form::Grid(Grid {
                holders: Holders::Cells(files),
                ..
            }) => files.to_vec(),
            Form::Grid(Grid {
                holders: Holders::Mesh(layout, files),
                ..
            }) => layout
                .holders()
                .map(|position| files[position as usize])
                .collect(),
            Form::Tiles(tiles) => tiles.tensors.iter().map(|tensor| tensor.file).collect(),
            Form::Flat(flat) => flat.pieces().map(|piece| piece.file).collect(),
            Form::Divided(divided) => {
                let places = divided.places()?.into_iter();
                places.map(|place| divided.file(place)).collect()
            }
        };
        files.retain(|&file| file != ZEROS);
        files.sort_unstable();
        files.dedup();
        Ok(files)
    }

    pub(super) fn dtype_of(&self, key: &str) -> Result<Dtype> {
        self.dtype_near(key, &mut Near::default())
    }

    pub(super) fn dtype_near(&self, key: &str, near: &mut Near) -> Result<Dtype> {
        match self.found_near(key, near)? {
            Found::Listed(stored) => self.dtype(stored),
            Found::InWholeFile(_, entry) => Ok(entry.dtype),
        }
    }

    pub(super) fn dtype(&self, stored: &Stored) -> Result<Dtype> {
        if let Some(dtype) = stored.dtype.get() {
            return Ok(*dtype);
        }
        let Form::Grid(Grid {
            holders: Holders::Table { files, .. },
            ..
        }) = &stored.form
        else {
            unreachable!("only tensors of a table have no dtype")
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

    /// Every stored region of a key, or its bounding box if it is in factored dims, and the files that hold it.
    pub fn shards(&self, key: &str) -> Result<Vec<(Region, Vec<u32>)>> {
        let stored = match self.found(key)? {
            Found::InWholeFile(file, entry) => {
                return Ok(vec![(Region::whole(&entry.shape), vec![file])]);
            }
            Found::Listed(stored) => stored,
        };
        match &stored.form {
            Form::Grid(grid) => (0..grid.n_cells())
                .map(|cell| grid.region(cell))
                .enumerate()
                .filter(|(_, region)| !region.is_empty() || grid.n_cells() == 1)
                .map(|(cell, region)| Ok((region, grid.files(cell as u64, u64::MAX))))
                .collect(),
            Form::Tiles(tiles) => Ok(tiles.shards()),
            Form::Divided(divided) => {
                let arrays = arrays_of_divided(divided, key)?;
                Ok(Tiles::new(&stored.shape, None, arrays, self.files.len(), true)?.shards())
            }
            Form::Flat(flat) => {
                let region = |piece: Piece<'_>| {
                    let tiles = piece.tiles(&stored.shape);
                    tiles
                        .map(|tile| (tile.global, vec![piece.file]))
                        .collect::<Vec<_>>()
                };
                Ok(flat.pieces().flat_map(region).collect())
            }
        }
    }

    /// Every stored array that holds a part of a key, and its tiles, replicas included. `add_tiles` accepts the result,
    /// without factors.
    pub fn stored_arrays(&self, key: &str) -> Result<Vec<(StoredTensor, Vec<Tile>)>> {
        let stored = match self.found(key)? {
            Found::InWholeFile(file, entry) => {
                return Ok(Grid::whole(&entry.shape, file).stored_arrays(key));
            }
            Found::Listed(stored) => stored,
        };
        match &stored.form {
            Form::Grid(grid) => Ok(grid.stored_arrays(&stored.key)),
            Form::Tiles(tiles) => tiles.stored_arrays(&stored.key),
            Form::Flat(flat) => Ok(arrays_of_flat(flat, &stored.shape)),
            Form::Divided(divided) => arrays_of_divided(divided, &stored.key),
        }
    }
}

fn n_cells(bounds: &[Vec<u64>]) -> Option<usize> {
    let mut n_parts = bounds.iter().map(|bounds| bounds.len().checked_sub(1));
    n_parts.try_fold(1_usize, |n, parts| n.checked_mul(parts?))
}

/// The shape of a tensor with these bounds of the parts of its dims, if they begin with 0 and grow.
fn shape_of(bounds: &[Vec<u64>]) -> Option<Vec<u64>> {
    let grows = |bounds: &Vec<u64>| bounds[0] == 0 && bounds.is_sorted_by(|a, b| a < b);
    let extents = bounds.iter().map(|bounds| bounds.last().copied());
    bounds
        .iter()
        .all(|one| !one.is_empty() && grows(one))
        .then(|| extents.collect())?
}

fn no_grid(key: &str) -> Error {
    let message = format!("{}: the files do not match the parts", named(key));
    Error::new(Kind::Argument, message).key(key)
}

/// Bytes of an element of the largest dtype.
const MAX_ITEM_BYTES: u64 = 16;

fn check_size(key: &str, shape: &[u64]) -> Result<()> {
    // Also a shape without elements: numpy multiplies its other extents.
    let mut extents = shape.iter().filter(|extent| **extent > 0);
    let n = extents.try_fold(1_u64, |n, extent| n.checked_mul(*extent));
    let most = i64::MAX as u64
        / if shape.contains(&0) {
            MAX_ITEM_BYTES
        } else {
            1
        };
    if n.is_some_and(|n| n <= most) {
        return Ok(());
    }
    let message = format!("{}: shape {} is too large", named(key), Dims(shape));
    Err(Error::damaged(message).key(key))
}

fn stored_twice(key: &str) -> Error {
    Error::damaged(format!("{} is stored twice", named(key))).key(key)
}
