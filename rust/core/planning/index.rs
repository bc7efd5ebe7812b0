//! The index of the stored shards, and the plan of a request.
//!
//! For each key the index holds the stored tiles: symbolically if they form a grid, so that its size does not depend on
//! the number of ranks, and explicitly otherwise (see `stored`).
//!
//! A file is opened when a plan first needs it. The plan holds the opened file, so that it reads the file that was
//! checked.

use crate::bytes::cast::can_cast;
use crate::bytes::strided::{CopyDims, Dim, dst_runs};
use crate::error::{Error, Kind, Printable, Result};
use crate::files::checksum::Checksums;
use crate::files::header::Entry;
use crate::files::local_array::{LocalArray, Part};
use crate::files::shard_file::{Format, ReadHeader, ShardFile, Table, verify_header};
use crate::files::source::{Method, Source, Stamp, closed};
use crate::geometry::dtype::{Dtype, n_elements};
use crate::geometry::layout::{Cuts, Layout};
use crate::geometry::region::{Dims, Region, row_major_strides};
use crate::geometry::tile::Tile;
use crate::planning::factors::Factors;
use crate::planning::plan::{Array, CopyOp, CopyOps, Plan, PlanSource, strided_copy};
use crate::planning::request::{RankRequest, Request, Requested, RequestedArray, WholeRequest};
use crate::planning::stored::{
    Form, Grid, Holders, SelectedCopy, Stored, StoredTensor, Tiles, ZEROS, choose, in_order, named,
    no_holder, select_whole,
};
use rayon::prelude::*;
use smallvec::smallvec;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::mem::take;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Files and stored tensors.
#[derive(Debug, Default)]
pub struct Index {
    files: Vec<FileSlot>,
    tensors: Vec<Stored>,
    by_key: HashMap<Arc<str>, u32>,
    whole_files: Vec<WholeFile>,
    is_closed: AtomicBool,
    read_checksums: Option<ReadChecksums>,
    /// Keys of tensors that no plan casts.
    uncast: HashSet<Box<str>>,
}

/// Reads the expected sizes and headers of files, and on request the checksums of their chunks.
#[derive(Clone)]
pub struct ReadChecksums(pub ReadsChecksums);

/// A function of the paths, and of whether the checksums of the chunks are needed.
type ReadsChecksums = Arc<dyn Fn(&[&Path], bool) -> Result<Vec<Checksums>> + Send + Sync>;

impl fmt::Debug for ReadChecksums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadChecksums")
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        let tables = (take(&mut self.tensors), take(&mut self.by_key));
        drop_large(tables.0.len(), tables);
    }
}

/// Frees a value beside the caller, if it consists of many parts: to free those of 100,000 tensors takes some 10
/// milliseconds.
pub fn drop_large<T: Send + 'static>(n_parts: usize, value: T) {
    const MANY: usize = 10_000;
    if n_parts >= MANY {
        // If no thread can be started, the function is dropped here, and the value with it.
        let _ = std::thread::Builder::new().spawn(move || drop(value));
    }
}

/// A file that changed while it was in use.
#[derive(Debug)]
pub struct Change<'a> {
    /// Its path.
    pub path: &'a Path,
    /// Its state when it was first opened.
    pub opened: Stamp,
    /// Its state now; `None`: there is no file at the path.
    pub now: Option<Stamp>,
}

/// Whether the folder of a file does not exist.
fn is_folder_gone(path: &Path) -> bool {
    let folder = path.parent();
    folder.is_some_and(|folder| !folder.as_os_str().is_empty() && !folder.exists())
}

/// A function that opens a file.
type Opener = Arc<dyn Fn() -> Result<Source> + Send + Sync>;

struct FileSlot {
    path: PathBuf,
    open: Opener,
    format: Format,
    checksums: OnceLock<Arc<Checksums>>,
    /// Whether `read_checksums` of the index is for this file: files that are added later have no checksums.
    is_recorded: bool,
    /// The state of the file when it was first opened, also by an index of the same files.
    stamp: Arc<OnceLock<Stamp>>,
    opened: Mutex<Option<Arc<ShardFile>>>,
    ahead: Mutex<Option<ReadHeader>>,
}

impl fmt::Debug for FileSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileSlot")
            .field("path", &self.path)
            .field("format", &self.format)
            .finish_non_exhaustive()
    }
}

/// A file whose tensors are all in the index. Each is stored completely in the file, under its key.
///
/// A file can have a million tensors. The index holds nothing per tensor: it uses the table of the file.
#[derive(Debug)]
struct WholeFile {
    file: u32,
    table: Arc<Table>,
    /// Number of entries of `tensors` that come before these.
    n_before: usize,
}

/// A tensor of the index.
enum Found<'a> {
    Listed(&'a Stored),
    InWholeFile(u32, Entry<'a>),
}

impl<'a> Found<'a> {
    fn name(&self) -> &'a str {
        match self {
            Self::Listed(stored) => &stored.key,
            Self::InWholeFile(_, entry) => entry.name,
        }
    }

    /// The files that hold all of it, in row-major order; `None` if it is stored otherwise.
    fn only_files(&self) -> Option<&[u32]> {
        match self {
            Self::InWholeFile(file, _) => Some(std::slice::from_ref(file)),
            Self::Listed(stored) => stored.only_cell(),
        }
    }

    /// The file that holds it completely, if there is one and no other.
    fn only_file(&self) -> Option<u32> {
        match self {
            Self::Listed(stored) => match &stored.form {
                Form::Grid(grid) => grid.only_file(&stored.shape),
                Form::Tiles(_) => None,
            },
            Self::InWholeFile(file, _) => Some(*file),
        }
    }

    fn shape(&self) -> &[u64] {
        match self {
            Self::Listed(stored) => &stored.shape,
            Self::InWholeFile(_, entry) => &entry.shape,
        }
    }
}

/// Tensors that one thread compares with the table of their file, or plans. More of them use the current pool.
pub const CHUNK_TENSORS: usize = 8192;

/// A tensor that a file must hold: its entry in the index, and its name and shape there.
type Expected<'a> = (&'a Stored, &'a str, Cow<'a, [u64]>);

/// The place in the index behind the tensor that was found last.
#[derive(Default)]
struct Near {
    /// Among the tensors that were added one by one.
    listed: usize,
    /// The file of which the tensors were added together, and the tensor in it.
    file: usize,
    in_file: usize,
}

/// A plan that is being made.
struct Planning {
    plan: Plan<'static>,
    cast: Option<Dtype>,
    /// The elements that are copied from each file.
    chosen: Vec<u64>,
    /// By number in the index, the files that were used.
    opened: Vec<Option<OpenedFile>>,
}

/// A file that a plan uses.
struct OpenedFile {
    file: Arc<ShardFile>,
    /// The number after that of the tensor that was found last: tensors are often requested in the order of the file.
    next: usize,
    /// Its number among the sources of the plan.
    source: Option<u32>,
}

impl OpenedFile {
    /// The number of a stored tensor.
    fn find(&mut self, name: &str) -> Option<usize> {
        let found = self.file.table().find_near(name, self.next)?;
        self.next = found + 1;
        Some(found)
    }
}

impl Planning {
    fn new(n_files: usize, cast: Option<Dtype>, verify: bool) -> Self {
        let plan = Plan {
            verify,
            ..Plan::default()
        };
        Self {
            plan,
            cast,
            chosen: vec![0; n_files],
            opened: (0..n_files).map(|_| None).collect(),
        }
    }

    /// The number of an opened file among the sources of the plan.
    fn source(&mut self, file: u32) -> u32 {
        let opened = self.opened[file as usize].as_mut().expect("opened before");
        *opened.source.get_or_insert_with(|| {
            let source = PlanSource::File(file, Arc::clone(&opened.file));
            self.plan.sources.push(source);
            self.plan.sources.len() as u32 - 1
        })
    }
}

/// The bytes of a tensor in one safetensors file, which are one run.
struct FileRun {
    /// Number of the file among the sources of the plan.
    source: u32,
    /// First byte of the tensor in the file.
    start: u64,
    /// Stored and requested.
    dtypes: (Dtype, Dtype),
    shape: Vec<u64>,
}

impl FileRun {
    /// The array of all of it, which has elements.
    fn array(self, name: &str) -> Result<Array> {
        let n = self.shape.iter().product();
        let run = Dim {
            len: n,
            src: 1,
            dst: 1,
        };
        let copy_op = CopyOp {
            source: self.source,
            src_start_bytes: self.start,
            dst: 0,
            dims: if n == 1 {
                CopyDims::new()
            } else {
                smallvec![run]
            },
        };
        Array::new(
            name.to_owned(),
            self.dtypes,
            &self.shape,
            smallvec![copy_op],
            Vec::new(),
        )
    }
}

/// The bytes of a tensor in a file that should hold it completely. `None`: it is no safetensors file, or its header says
/// otherwise. `next` is the number of the tensor that is looked for first, and `source` that of the file in the plan.
fn run_of(
    found: &Found<'_>,
    file: &ShardFile,
    next: &mut usize,
    source: u32,
    cast: Option<Dtype>,
) -> Result<Option<FileRun>> {
    let Table::Header(header) = &**file.table() else {
        return Ok(None);
    };
    let key = found.name();
    let Some(number) = header.find_near(key, *next) else {
        return Ok(None);
    };
    *next = number + 1;
    let Entry {
        dtype: stored,
        shape,
        start,
        ..
    } = header.entry(number);
    let expected = match found {
        Found::InWholeFile(_, entry) => entry.dtype,
        Found::Listed(listed) => *listed.dtype.get_or_init(|| stored),
    };
    if (stored, &shape[..]) != (expected, found.shape()) {
        return Ok(None);
    }
    let requested = cast_target(stored, cast).map_err(|error| error.key(key).within(named(key)))?;
    Ok(Some(FileRun {
        source,
        start: header.data_start() + start,
        dtypes: (stored, requested),
        shape,
    }))
}

/// A tensor in one safetensors file, of which boxes are read.
struct BoxSource {
    /// Number of the file in the index.
    file: u32,
    bytes: FileRun,
    unit_bytes: u64,
    strides: Vec<u64>,
}

impl BoxSource {
    /// The array of a box, which is not empty.
    fn array(&self, name: &str, held: &Region) -> Result<Array> {
        let src = held.offset().iter().zip(&self.strides);
        let src: u64 = src.map(|(at, stride)| at * stride).sum();
        let strides = row_major_strides(held.shape());
        let (_, dst, dims) = strided_copy(held, (src, &self.strides), (0, &strides));
        let copy_op = CopyOp {
            source: self.bytes.source,
            src_start_bytes: self.bytes.start + src * self.unit_bytes,
            dst,
            dims,
        };
        Array::new(
            name.to_owned(),
            self.bytes.dtypes,
            held.shape(),
            smallvec![copy_op],
            Vec::new(),
        )
    }
}

impl Index {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets no plan cast these tensors, whatever dtype is requested. Keys that the index does not have are ignored.
    pub fn keep_dtypes(&mut self, keys: impl IntoIterator<Item = Box<str>>) {
        self.uncast.extend(keys);
    }

    /// The dtype to which a tensor is cast, if `cast` is requested.
    fn cast_of(&self, key: &str, cast: Option<Dtype>) -> Option<Dtype> {
        cast.filter(|_| self.uncast.is_empty() || !self.uncast.contains(key))
    }

    /// Adds a shard file and returns its number. The file is opened when it is needed.
    pub fn add_file(&mut self, path: PathBuf, follow_links: bool, method: Method) -> u32 {
        self.add_local(path, follow_links, method, Format::Safetensors)
    }

    /// Adds a local file of a format and returns its number. The file is opened when it is needed.
    pub fn add_local(
        &mut self,
        path: PathBuf,
        follow_links: bool,
        method: Method,
        format: Format,
    ) -> u32 {
        let named = path.clone();
        let open = move || Source::open(&path, follow_links, method);
        self.add_source(named, format, open)
    }

    /// Adds a file that `open` opens when it is needed, and returns its number. `path` names it in messages.
    pub fn add_source(
        &mut self,
        path: PathBuf,
        format: Format,
        open: impl Fn() -> Result<Source> + Send + Sync + 'static,
    ) -> u32 {
        self.files.push(FileSlot {
            path,
            open: Arc::new(open),
            format,
            checksums: OnceLock::new(),
            is_recorded: false,
            stamp: Arc::default(),
            opened: Mutex::new(None),
            ahead: Mutex::new(None),
        });
        self.files.len() as u32 - 1
    }

    /// An index of the same files without tensors: the files with these numbers become 0, 1, ... They are opened again.
    ///
    /// # Errors
    /// There is no such file.
    pub fn files_again(&self, numbers: &[u32]) -> Result<Self> {
        let mut index = Self::new();
        index.read_checksums.clone_from(&self.read_checksums);
        for &number in numbers {
            let slot = self.slot(number)?;
            index.files.push(FileSlot {
                path: slot.path.clone(),
                open: Arc::clone(&slot.open),
                format: slot.format.clone(),
                checksums: slot.checksums.clone(),
                is_recorded: slot.is_recorded,
                stamp: Arc::clone(&slot.stamp),
                opened: Mutex::new(None),
                ahead: Mutex::new(None),
            });
        }
        Ok(index)
    }

    /// Sets the header of a safetensors file, which was read before its checksums are known. It is compared with them when
    /// the file is opened.
    pub fn set_read_header(&mut self, file: u32, ahead: ReadHeader) {
        if let Some(slot) = self.files.get_mut(file as usize) {
            slot.ahead = Mutex::new(Some(ahead));
        }
    }

    /// Sets the expected size and checksums of a file before it is opened.
    ///
    /// # Errors
    /// There is no such file, it is already open, or it is not a safetensors file.
    pub fn set_checksums(&mut self, file: u32, checksums: Checksums) -> Result<()> {
        let n_files = self.files.len();
        let slot = self.files.get_mut(file as usize).ok_or_else(|| {
            Error::new(
                Kind::Argument,
                format!("there is no file {file} among {n_files}"),
            )
        })?;
        let opened = slot.opened.get_mut();
        if opened.map_or(true, |opened| opened.is_some()) {
            let message = format!("{} is already open", slot.path.display());
            return Err(Error::new(Kind::Argument, message));
        }
        if !matches!(slot.format, Format::Safetensors) {
            let message = format!(
                "{} is not a safetensors file: checksums are not supported",
                slot.path.display()
            );
            return Err(Error::new(Kind::Argument, message));
        }
        slot.checksums = OnceLock::from(Arc::new(checksums));
        Ok(())
    }

    /// Sets what reads the sizes, headers and checksums of the safetensors files of the index for which
    /// [`Self::set_checksums`] was not called, when they are opened, and the checksums of chunks that it did not give,
    /// when a plan verifies them.
    pub fn set_checksums_reader(&mut self, read: ReadChecksums) {
        self.read_checksums = Some(read);
        for slot in &mut self.files {
            slot.is_recorded = matches!(slot.format, Format::Safetensors);
        }
    }

    /// Reads what is not known yet of files. Holds no lock: what reads may wait for another thread.
    fn read_checksums(
        &self,
        files: impl IntoIterator<Item = u32>,
        with_chunks: bool,
    ) -> Result<()> {
        let mut missing = Vec::new();
        for file in files {
            let slot = self.slot(file)?;
            let is_known = match slot.checksums.get() {
                Some(checksums) => !with_chunks || checksums.has_chunks(),
                None => !slot.is_recorded,
            };
            if !is_known {
                missing.push(file);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        missing.sort_unstable();
        missing.dedup();
        let slots: Vec<&FileSlot> = missing.iter().map(|&i| &self.files[i as usize]).collect();
        let paths: Vec<&Path> = slots.iter().map(|slot| slot.path.as_path()).collect();
        let found = match &self.read_checksums {
            Some(read) => (read.0)(&paths, with_chunks)?,
            None => Vec::new(),
        };
        if found.len() != slots.len() {
            let message = format!("{} of {} checksums were read", found.len(), slots.len());
            return Err(Error::new(Kind::Argument, message));
        }
        for (slot, found) in slots.into_iter().zip(found) {
            let known = slot.checksums.get_or_init(|| Arc::new(found.clone()));
            if with_chunks && !known.has_chunks() {
                let completed = known.complete(found);
                completed.map_err(|error| error.within(slot.path.display()).path(&slot.path))?;
            }
        }
        Ok(())
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
        if files.len() as u64 != layout.mesh().n_points()
            || files.iter().any(|&f| f as usize >= self.files.len())
        {
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
        let mut stored = Vec::new();
        for position in layout.holders() {
            let tensor = StoredTensor {
                file: files[position as usize],
                name: key.to_owned(),
                shape: layout.local_shape(position),
            };
            stored.push((tensor, layout.tiles(position)));
        }
        self.add_tiles(
            key,
            dtype,
            layout.shape().to_vec(),
            BTreeMap::new(),
            stored,
            true,
        )
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
            && files.iter().all(|&file| (file as usize) < self.files.len());
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

    /// Adds a tensor whose parts form a grid, each stored under its key in one file.
    ///
    /// # Errors
    /// The bounds of a dim do not begin with 0 or do not grow, or there is not one file for each cell.
    pub fn add_grid(
        &mut self,
        key: &str,
        dtype: Dtype,
        bounds: Vec<Vec<u64>>,
        starts: Arc<[u32]>,
        files: impl Into<Arc<[u32]>>,
    ) -> Result<()> {
        let files: Arc<[u32]> = files.into();
        let n_cells = bounds.iter().try_fold(1_usize, |n, bounds| {
            n.checked_mul(bounds.len().checked_sub(1)?)
        });
        let is_grid = n_cells == Some(files.len())
            && starts.len() == files.len() + 1
            && starts.iter().enumerate().all(|(i, &at)| i == at as usize)
            && files.iter().all(|&file| (file as usize) < self.files.len())
            && bounds
                .iter()
                .all(|bounds| bounds.first() == Some(&0) && bounds.is_sorted_by(|a, b| a < b));
        if !is_grid {
            let message = format!("{}: the files do not match the parts", named(key));
            return Err(Error::new(Kind::Argument, message).key(key));
        }
        let shape = bounds.iter().map(|bounds| bounds[bounds.len() - 1]);
        let shape: Vec<u64> = shape.collect();
        let form = Form::Grid(Grid {
            order: in_order(shape.len()),
            cuts: bounds.into_iter().map(Cuts::Listed).collect(),
            holders: Holders::Table { starts, files },
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

    /// Number of files.
    pub fn n_files(&self) -> usize {
        self.files.len()
    }

    /// Path of a file.
    pub fn file_path(&self, file: u32) -> Result<&Path> {
        Ok(&self.slot(file)?.path)
    }

    /// How a file tells what it holds.
    pub fn file_format(&self, file: u32) -> Result<&Format> {
        Ok(&self.slot(file)?.format)
    }

    fn slot(&self, file: u32) -> Result<&FileSlot> {
        self.files
            .get(file as usize)
            .ok_or_else(|| Error::new(Kind::Argument, format!("there is no file {file}")))
    }

    /// Opens a file, or returns the opened file.
    pub fn open(&self, file: u32) -> Result<Arc<ShardFile>> {
        self.read_checksums([file], false)?;
        let slot = self.slot(file)?;
        let mut opened = lock(&slot.opened);
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        if let Some(opened) = &*opened {
            return Ok(Arc::clone(opened));
        }
        let checksums = slot.checksums.get().cloned();
        let ahead = lock(&slot.ahead).take();
        let shard_file = match ahead {
            Some(ahead) => ahead.open(checksums)?,
            None => ShardFile::open((slot.open)()?, &slot.format, checksums)?,
        };
        if let Some(stamp) = shard_file.source().stamp() {
            slot.stamp.get_or_init(|| stamp);
        }
        let shard_file = Arc::new(shard_file);
        *opened = Some(Arc::clone(&shard_file));
        Ok(shard_file)
    }

    /// The first file without checksums that is not what it was when it was first opened; `None` if there is none.
    ///
    /// A file is compared by the path, so that a file that got its name is a change. With its folder it may be removed:
    /// what was opened is read as it was. With `in_place`, only the opened file is examined, whatever the path names.
    ///
    /// # Errors
    /// The system cannot examine a file.
    pub fn changed_file(&self, in_place: bool) -> Result<Option<Change<'_>>> {
        for slot in &self.files {
            let Some(&opened) = slot.stamp.get() else {
                continue;
            };
            if slot.is_recorded || slot.checksums.get().is_some() {
                continue;
            }
            let of_path = if in_place {
                None
            } else {
                Stamp::of_path(&slot.path)?
            };
            let is_removed = !in_place && of_path.is_none() && !is_folder_gone(&slot.path);
            let now = match of_path {
                Some(now) => Some(now).filter(|now| *now != opened),
                None if is_removed => None,
                None => {
                    let file = lock(&slot.opened).clone();
                    let now = file.map_or(Ok(None), |file| file.source().stamp_now())?;
                    now.filter(|now| !now.has_same_content(&opened))
                }
            };
            if is_removed || now.is_some() {
                let path = &slot.path;
                return Ok(Some(Change { path, opened, now }));
            }
        }
        Ok(None)
    }

    /// Closes the files. Existing plans keep the files that they use.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        for slot in &self.files {
            *lock(&slot.opened) = None;
            *lock(&slot.ahead) = None;
        }
    }

    fn found(&self, key: &str) -> Result<Found<'_>> {
        self.found_near(key, &mut Near::default())
    }

    /// As [`Self::found`]. Keys are often requested in the order of the index, and then no key is hashed.
    fn found_near(&self, key: &str, near: &mut Near) -> Result<Found<'_>> {
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
                holders: Holders::Mesh(layout, files),
                ..
            }) => layout
                .holders()
                .map(|position| files[position as usize])
                .collect(),
            Form::Tiles(tiles) => tiles.tensors.iter().map(|tensor| tensor.file).collect(),
        };
        files.retain(|&file| file != ZEROS);
        files.sort_unstable();
        files.dedup();
        Ok(files)
    }

    fn dtype_of(&self, key: &str) -> Result<Dtype> {
        self.dtype_near(key, &mut Near::default())
    }

    fn dtype_near(&self, key: &str, near: &mut Near) -> Result<Dtype> {
        match self.found_near(key, near)? {
            Found::Listed(stored) => self.dtype(stored),
            Found::InWholeFile(_, entry) => Ok(entry.dtype),
        }
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
        }
    }

    /// Checks that the stored regions of every key cover it without gaps.
    pub fn check_coverage(&self) -> Result<()> {
        self.tensors
            .par_iter()
            .try_for_each(|stored| match &stored.form {
                Form::Grid(grid) => grid.check_coverage(stored),
                Form::Tiles(tiles) => tiles.check_coverage(stored),
            })
    }

    /// Opens every file that holds a tensor and compares it with the index. Returns `(file, name)` of unlisted tensors.
    pub fn check(&self) -> Result<Vec<(u32, String)>> {
        self.check_coverage()?;
        // Their entries come from their headers, so opening them is the only check.
        for whole in &self.whole_files {
            self.open(whole.file)?;
        }
        let mut expected: Vec<Vec<Expected<'_>>> =
            (0..self.files.len()).map(|_| Vec::new()).collect();
        for stored in &self.tensors {
            if let Some(files) = stored.only_cell() {
                for &file in files {
                    let shape = Cow::Borrowed(&*stored.shape);
                    expected[file as usize].push((stored, &stored.key, shape));
                }
                continue;
            }
            match &stored.form {
                Form::Grid(grid) => {
                    for cell in 0..grid.n_cells() {
                        let region = grid.region(cell);
                        let shape: Vec<u64> =
                            grid.order.iter().map(|&d| region.shape()[d]).collect();
                        for file in grid.files(cell, u64::MAX) {
                            let shape = Cow::Owned(shape.clone());
                            expected[file as usize].push((stored, &stored.key, shape));
                        }
                    }
                }
                Form::Tiles(tiles) => {
                    for tensor in tiles.tensors.iter().filter(|one| one.file != ZEROS) {
                        let shape = Cow::Borrowed(&*tensor.shape);
                        expected[tensor.file as usize].push((stored, &tensor.name, shape));
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
                let table = opened.table();
                let is_whole = self.whole_files.iter().any(|whole| whole.file == file);
                let is_known = (0..table.len()).map(|_| AtomicBool::new(is_whole));
                let is_known: Vec<AtomicBool> = is_known.collect();
                let chunks = expected.par_chunks(CHUNK_TENSORS).enumerate();
                chunks.try_for_each(|(i, expected)| {
                    // Tensors are often listed in the order of the file.
                    let mut next = i * CHUNK_TENSORS;
                    for &(stored, name, ref shape) in expected {
                        let at = table
                            .find_near(name, next)
                            .ok_or_else(|| self.missing_in(file, name))?;
                        is_known[at].store(true, Ordering::Relaxed);
                        next = at + 1;
                        let found = table.dtype(at);
                        let dtype = *stored.dtype.get_or_init(|| found);
                        if found != dtype || !table.has_shape(at, shape) {
                            let entry = table.entry(at);
                            let found = (entry.dtype, &entry.shape[..]);
                            self.check_stored(file, name, found, (dtype, shape))?;
                        }
                    }
                    Ok(())
                })?;
                let is_known = is_known.into_iter().map(AtomicBool::into_inner);
                let unlisted = is_known.enumerate().filter(|(_, known)| !known);
                Ok(unlisted
                    .map(|(i, _)| (file, table.entry(i).name.to_owned()))
                    .collect())
            })
            .collect::<Result<_>>()?;
        Ok(unlisted.into_iter().flatten().collect())
    }

    /// Like [`Self::check`], but the header of a file is not parsed if its checksum is known and the described tensors
    /// fill the file, so that it holds no others: its bytes are read and compared with the checksum, and nothing is
    /// kept. `dtype_of` gives the described dtype of a key, or `None`.
    ///
    /// That such a file holds the described tensors is checked when it is opened.
    pub fn check_headers(
        &self,
        dtype_of: impl Fn(&str) -> Option<Dtype>,
    ) -> Result<Vec<(u32, String)>> {
        let described = self.described_bytes(dtype_of);
        let is_filled = |(slot, described): (&FileSlot, &Option<u64>)| {
            let checksums = slot.checksums.get();
            checksums.is_some_and(|one| *described == Some(one.n_bytes() - one.header_bytes()))
        };
        if !self.files.iter().zip(&described).all(is_filled) {
            return self.check();
        }
        self.check_coverage()?;
        self.files
            .par_iter()
            .try_for_each(|slot| match slot.checksums.get() {
                Some(checksums) => verify_header(&(slot.open)()?, checksums),
                None => Ok(()),
            })?;
        Ok(Vec::new())
    }

    /// For each file the bytes of its described tensors; `None` if that is not known.
    fn described_bytes(&self, dtype_of: impl Fn(&str) -> Option<Dtype>) -> Vec<Option<u64>> {
        let mut described: Vec<Option<u64>> = vec![Some(0); self.files.len()];
        for whole in &self.whole_files {
            described[whole.file as usize] = None;
        }
        for stored in &self.tensors {
            let dtype = stored.dtype.get().copied();
            let dtype = dtype.or_else(|| dtype_of(&stored.key));
            let mut add = |file: u32, shape: &[u64]| {
                let n_bytes = dtype.and_then(|dtype| dtype.n_bytes(shape));
                let sum = &mut described[file as usize];
                *sum = sum.and_then(|sum| sum.checked_add(n_bytes?));
            };
            match &stored.form {
                Form::Grid(grid) => {
                    let even = grid.cuts.iter().map(|cuts| match cuts {
                        Cuts::Even { extent, n_parts } => Some(extent / n_parts),
                        _ => None,
                    });
                    if let (Holders::Table { files, .. }, Some(shape)) =
                        (&grid.holders, even.collect::<Option<Vec<_>>>())
                    {
                        files.iter().for_each(|&file| add(file, &shape));
                    } else {
                        return vec![None; self.files.len()];
                    }
                }
                Form::Tiles(tiles) => {
                    for tensor in tiles.tensors.iter().filter(|one| one.file != ZEROS) {
                        add(tensor.file, &tensor.shape);
                    }
                }
            }
        }
        described
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
            "{} in {}: expected {} {}, found {} {}",
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
            "{} does not hold the expected tensor {}",
            path.display(),
            named(name)
        ))
        .key(name)
        .path(path)
    }

    /// As [`Self::plan`].
    pub fn plan_requested(
        &self,
        requested: &Requested,
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        let of_rank = match requested {
            Requested::Whole(request) => return self.plan_whole(request, cast, verify),
            Requested::OfRank(request) => request.whole(),
            Requested::Listed(_) => None,
        };
        match of_rank {
            Some(request) => self.plan_whole(&request, cast, verify),
            None => self.plan(&*requested.request()?, cast, verify),
        }
    }

    /// Plans the copies of a request and checks them. With `cast`, floating-point tensors are cast to that dtype;
    /// others are not. With `verify`, execution compares every chunk that it reads with its checksum, for files with
    /// checksums.
    pub fn plan(
        &self,
        request: &Request,
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        self.plan_together(&[Cow::Borrowed(request)], cast, verify)
    }

    /// One plan of several requests, with their arrays one after the other. See [`Self::plan`].
    pub fn plan_together(
        &self,
        requests: &[Cow<'_, Request>],
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        let arrays = || requests.iter().flat_map(|request| &request.arrays);
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        // Keys and shapes are checked first, so that no file is opened for an invalid request.
        let found = arrays()
            .map(|requested| self.check_requested(requested))
            .collect::<Result<Vec<_>>>()?;
        let mut planning = Planning::new(self.files.len(), cast, verify);
        for (requested, found) in arrays().zip(&found) {
            self.plan_array(&mut planning, requested, found.as_ref())?;
        }
        Ok(planning.plan)
    }

    /// One plan of the requests of several files, as [`Self::plan_together`] makes it. If they are those of ranks for the
    /// same keys, what does not depend on the rank is done once.
    pub(crate) fn plan_files(
        &self,
        requests: &[&Requested],
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        let of_ranks = requests.iter().map(|requested| match requested {
            Requested::OfRank(request) => Some(request),
            Requested::Listed(_) | Requested::Whole(_) => None,
        });
        if let Some(of_ranks) = of_ranks.collect::<Option<Vec<_>>>()
            && let Some(first) = of_ranks.first()
            && of_ranks
                .iter()
                .all(|request| Arc::ptr_eq(request.keys(), first.keys()))
        {
            return self.plan_ranks(first.keys(), &of_ranks, cast, verify);
        }
        let requests = requests.iter().map(|requested| requested.request());
        self.plan_together(&requests.collect::<Result<Vec<_>>>()?, cast, verify)
    }

    fn plan_ranks(
        &self,
        keys: &[(String, Arc<Layout>)],
        requests: &[&RankRequest],
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        let mut near = Near::default();
        let found = keys.iter().map(|(key, layout)| {
            let found = self.found_near(key, &mut near)?;
            check_shape(key, &found, layout.shape())?;
            Ok(found)
        });
        let found = found.collect::<Result<Vec<_>>>()?;
        let mut planning = Planning::new(self.files.len(), cast, verify);
        let sources = found
            .iter()
            .map(|found| self.box_source(&mut planning, found));
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let n_arrays = keys.len() * requests.len();
        planning.plan.arrays.reserve_exact(n_arrays);
        for rank in requests.iter().map(|request| request.rank()) {
            for (((key, layout), found), source) in keys.iter().zip(&found).zip(&sources) {
                let position = layout.mesh().position(rank)?;
                let held = layout.only_box(position).filter(|_| layout.holds(position));
                if let (Some(source), Some(held)) = (source, held) {
                    planning.chosen[source.file as usize] += held.n_elements();
                    planning.plan.arrays.push(source.array(key, &held)?);
                    continue;
                }
                let mut request = Request::default();
                request.add(key, key, layout, position)?;
                self.plan_array(&mut planning, &request.arrays[0], Some(found))?;
            }
        }
        Ok(planning.plan)
    }

    /// Where boxes of a tensor are read that one safetensors file holds completely. `None`: it is not such a tensor, or
    /// there is something wrong with it, and [`Self::plan_array`] must plan its boxes.
    fn box_source(&self, planning: &mut Planning, found: &Found<'_>) -> Result<Option<BoxSource>> {
        let Some(file) = found.only_file() else {
            return Ok(None);
        };
        let Some(bytes) = self.run_in(planning, found, file)? else {
            return Ok(None);
        };
        let (per_unit, unit_bytes) = bytes.dtypes.0.unit();
        let strides = row_major_strides(&bytes.shape);
        Ok((per_unit == 1).then_some(BoxSource {
            file,
            bytes,
            unit_bytes,
            strides,
        }))
    }

    /// The bytes of a tensor in a file that should hold it completely. `None`: it is no safetensors file, or its header
    /// says otherwise.
    fn run_in(
        &self,
        planning: &mut Planning,
        found: &Found<'_>,
        file: u32,
    ) -> Result<Option<FileRun>> {
        if planning.plan.verify && planning.opened[file as usize].is_none() {
            self.read_checksums([file], true)?;
        }
        let used = self.opened_for(planning, file)?;
        let (opened, mut next) = (Arc::clone(&used.file), used.next);
        let cast = self.cast_of(found.name(), planning.cast);
        let run = run_of(found, &opened, &mut next, 0, cast)?;
        if let Some(opened) = &mut planning.opened[file as usize] {
            opened.next = next;
        }
        Ok(run.map(|run| FileRun {
            source: planning.source(file),
            ..run
        }))
    }

    /// Most of 100,000 tensors lie in one file each, as one run: they need no geometry.
    fn plan_whole(
        &self,
        request: &WholeRequest,
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        if request.len() > CHUNK_TENSORS
            && let Some(plan) = self.plan_runs(request, cast, verify)
        {
            return Ok(plan);
        }
        // Keys are checked first, so that no file is opened for an invalid request.
        let mut near = Near::default();
        let found = request.arrays().map(|(_, key, shape)| {
            let found = self.found_near(key, &mut near)?;
            check_shape(key, &found, shape)?;
            Ok(found)
        });
        let found = found.collect::<Result<Vec<_>>>()?;
        let mut planning = Planning::new(self.files.len(), cast, verify);
        planning.plan.arrays.reserve_exact(found.len());
        for ((name, key, shape), found) in request.arrays().zip(&found) {
            if !self.plan_one_run(&mut planning, name, found)?
                && !self.plan_cells(&mut planning, name, found)?
            {
                let mut request = Request::default();
                request.add_region(name, key, Region::whole(shape));
                self.plan_array(&mut planning, &request.arrays[0], Some(found))?;
            }
        }
        Ok(planning.plan)
    }

    /// The plan of many tensors, on all threads of the pool. Each is one run of bytes of one safetensors file, and none
    /// has replicas, among which one would be chosen. `None`: this is not so, or there is something wrong with one.
    fn plan_runs(
        &self,
        request: &WholeRequest,
        cast: Option<Dtype>,
        verify: bool,
    ) -> Option<Plan<'static>> {
        let n_chunks = request.len().div_ceil(CHUNK_TENSORS);
        let range = |i: usize| i * CHUNK_TENSORS..request.len().min((i + 1) * CHUNK_TENSORS);
        let find = |i: usize| {
            let (mut near, mut found) = (Near::default(), Vec::with_capacity(CHUNK_TENSORS));
            let mut files = Vec::new();
            for (_, key, shape) in request.arrays_in(range(i)) {
                let one = self.found_near(key, &mut near).ok()?;
                let &[file] = one.only_files()? else {
                    return None;
                };
                if one.shape() != shape || shape.contains(&0) {
                    return None;
                }
                if files.last() != Some(&file) {
                    files.push(file);
                }
                found.push((one, file));
            }
            Some((found, files))
        };
        let found: Option<Vec<_>> = (0..n_chunks).into_par_iter().map(find).collect();
        let found = found?;
        let mut planning = Planning::new(self.files.len(), cast, verify);
        for &file in found.iter().flat_map(|(_, files)| files) {
            if planning.opened[file as usize].is_none() {
                if verify {
                    self.read_checksums([file], true).ok()?;
                }
                self.opened_for(&mut planning, file).ok()?;
                planning.source(file);
            }
        }
        let plan = |(i, found): (usize, Vec<(Found<'_>, u32)>)| {
            let mut next = vec![0; self.files.len()];
            let arrays = request.arrays_in(range(i)).zip(found);
            let arrays = arrays.map(|((name, ..), (found, file))| {
                let opened = planning.opened[file as usize].as_ref()?;
                let next = &mut next[file as usize];
                let cast = self.cast_of(found.name(), cast);
                let bytes = run_of(&found, &opened.file, next, opened.source?, cast);
                bytes.ok()??.array(name).ok()
            });
            arrays.collect::<Option<Vec<Array>>>()
        };
        let found = found.into_iter().map(|(found, _)| found).enumerate();
        let chunks: Vec<_> = found.collect();
        let chunks: Option<Vec<_>> = chunks.into_par_iter().map(plan).collect();
        planning.plan.arrays = chunks?.into_iter().flatten().collect();
        Some(planning.plan)
    }

    /// Adds a tensor that is one run of bytes of one safetensors file. `false`: it is not, or there is something wrong
    /// with it, and [`Self::plan_array`] must plan it.
    fn plan_one_run(&self, planning: &mut Planning, name: &str, found: &Found<'_>) -> Result<bool> {
        let Some(files) = found.only_files() else {
            return Ok(false);
        };
        let n: u64 = found.shape().iter().product();
        if n == 0 {
            return Ok(false);
        }
        let Some(file) = choose(files, &mut planning.chosen, n) else {
            return Ok(false);
        };
        let Some(bytes) = self.run_in(planning, found, file)? else {
            return Ok(false);
        };
        let array = bytes.array(name)?;
        planning.plan.arrays.push(array);
        Ok(true)
    }

    /// Adds a tensor whose parts form a grid in safetensors files. `false` as of [`Self::plan_one_run`].
    fn plan_cells(&self, planning: &mut Planning, name: &str, found: &Found<'_>) -> Result<bool> {
        let Found::Listed(stored) = found else {
            return Ok(false);
        };
        let Form::Grid(grid) = &stored.form else {
            return Ok(false);
        };
        if stored.only_cell().is_some() || stored.shape.contains(&0) {
            return Ok(false);
        }
        let Some(cells) = grid.select_all(&stored.shape, &mut planning.chosen) else {
            return Ok(false);
        };
        if planning.plan.verify {
            let files = cells.iter().map(|cell| cell.file);
            let new = files.filter(|&file| planning.opened[file as usize].is_none());
            self.read_checksums(new, true)?;
        }
        let mut copy_ops = CopyOps::with_capacity(cells.len());
        for cell in cells {
            let used = self.opened_for(planning, cell.file)?;
            let opened = Arc::clone(&used.file);
            let Table::Header(header) = &**opened.table() else {
                return Ok(false);
            };
            let Some(number) = used.find(&stored.key) else {
                return Ok(false);
            };
            let entry = header.entry(number);
            let dtype = *stored.dtype.get_or_init(|| entry.dtype);
            if (entry.dtype, &entry.shape) != (dtype, &cell.stored_shape) {
                return Ok(false);
            }
            copy_ops.push(CopyOp {
                source: planning.source(cell.file),
                src_start_bytes: header.data_start() + entry.start,
                dst: cell.dst,
                dims: cell.dims,
            });
        }
        let stored_dtype = self.dtype(stored)?;
        let dtype = cast_target(stored_dtype, self.cast_of(&stored.key, planning.cast))
            .map_err(|error| error.key(&stored.key).within(named(&stored.key)))?;
        let array = Array::new(
            name.to_owned(),
            (stored_dtype, dtype),
            &stored.shape,
            copy_ops,
            Vec::new(),
        )?;
        planning.plan.arrays.push(array);
        Ok(true)
    }

    /// A file, opened when it is first used.
    fn opened_for<'p>(&self, planning: &'p mut Planning, file: u32) -> Result<&'p mut OpenedFile> {
        let slot = &mut planning.opened[file as usize];
        if slot.is_none() {
            *slot = Some(OpenedFile {
                file: self.open(file)?,
                next: 0,
                source: None,
            });
        }
        Ok(slot.as_mut().expect("opened above"))
    }

    /// Plans one array of a request. `found` is the tensor of all its tiles, if there is one.
    fn plan_array(
        &self,
        planning: &mut Planning,
        requested: &RequestedArray,
        found: Option<&Found<'_>>,
    ) -> Result<()> {
        let (first_key, _) = &requested.keys[0];
        let mut selected = self.select(requested, found, &mut planning.chosen)?;
        let mut padding = requested.padding.clone();
        if selected.iter().any(|one| one.file == ZEROS) {
            selected.retain(|one| {
                if one.file == ZEROS {
                    padding.extend(dst_runs(one.copy_op.dst, &one.copy_op.dims));
                }
                one.file != ZEROS
            });
            padding.sort_unstable();
        }
        if planning.plan.verify {
            let files = selected.iter().map(|one| one.file);
            let new = files.filter(|&file| planning.opened[file as usize].is_none());
            self.read_checksums(new, true)?;
        }
        let stored_dtype = match found {
            Some(Found::InWholeFile(_, entry)) => entry.dtype,
            Some(Found::Listed(stored)) if stored.dtype.get().is_some() => self.dtype(stored)?,
            _ => {
                for one in &selected {
                    if requested.keys.iter().any(|(key, _)| key == one.name) {
                        self.set_dtype_from_file(one)?;
                    }
                }
                self.dtype_of(first_key)?
            }
        };
        for (key, _) in &requested.keys[1..] {
            let dtype = self.dtype_of(key)?;
            if dtype != stored_dtype {
                let message = format!(
                    "`{}` joins {} of {stored_dtype} and {} of {dtype}; expected the same dtype",
                    Printable(&requested.name),
                    named(first_key),
                    named(key),
                );
                return Err(Error::new(Kind::Mismatch, message).key(key));
            }
        }
        let dtype = cast_target(stored_dtype, self.cast_of(first_key, planning.cast))
            .map_err(|error| error.key(first_key).within(named(first_key)))?;
        let mut copy_ops = CopyOps::new();
        for one in selected {
            let SelectedCopy {
                file,
                name,
                stored_shape,
                mut src,
                mut copy_op,
                boxes,
            } = one;
            let used = self.opened_for(planning, file)?;
            let opened = Arc::clone(&used.file);
            let table = opened.table();
            if let Some(strides) = table.strides(name) {
                let boxes = boxes.expect("a safetensors file has no strides");
                let strided = boxes.strided(&stored_shape, strides);
                (src, copy_op.dims) =
                    strided.map_err(|error| error.key(name).within(named(name)))?;
            }
            let number = used.find(name);
            let entry = table.entry(number.ok_or_else(|| self.missing_in(file, name))?);
            let (found, start) = (entry.dtype, table.data_start() + entry.start);
            self.check_stored(
                file,
                name,
                (found, &entry.shape),
                (stored_dtype, &stored_shape),
            )?;
            copy_op.source = planning.source(file);
            let (per_unit, unit_bytes) = stored_dtype.unit();
            if !src.is_multiple_of(per_unit) {
                let message = format!(
                    "a shard of {} ({stored_dtype}) does not begin or end at a byte boundary",
                    named(name)
                );
                return Err(Error::new(Kind::Unsupported, message).key(name));
            }
            copy_op.src_start_bytes = start + src / per_unit * unit_bytes;
            copy_ops.push(copy_op);
        }
        let array = Array::new(
            requested.name.clone(),
            (stored_dtype, dtype),
            &requested.shape,
            copy_ops,
            padding,
        )?;
        planning.plan.arrays.push(array);
        Ok(())
    }

    /// The dtype and the bytes of each array of a request, without a plan. `cast` as in [`Self::plan`].
    ///
    /// # Errors
    /// There is no such key, it cannot be cast, an array is not an integer number of bytes, or all are too large.
    pub fn request_sizes(
        &self,
        requested: &Requested,
        cast: Option<Dtype>,
    ) -> Result<Vec<(Dtype, u64)>> {
        let mut sizes = Vec::with_capacity(requested.len());
        self.each_size(requested, cast, |dtype, n_bytes| {
            sizes.push((dtype, n_bytes));
        })?;
        Ok(sizes)
    }

    /// The bytes of all arrays of a request. `cast` and errors as [`Self::request_sizes`].
    pub fn request_bytes(&self, requested: &Requested, cast: Option<Dtype>) -> Result<u64> {
        let mut sum = 0;
        self.each_size(requested, cast, |_, n_bytes| sum += n_bytes)?;
        Ok(sum)
    }

    /// Calls a function with the dtype and the bytes of each array of a request.
    fn each_size(
        &self,
        requested: &Requested,
        cast: Option<Dtype>,
        mut each: impl FnMut(Dtype, u64),
    ) -> Result<()> {
        let (mut sum, mut near) = (0_u64, Near::default());
        let mut add = |key: &str, name: &str, n: u64| {
            let stored = self.dtype_near(key, &mut near)?;
            let dtype = cast_target(stored, self.cast_of(key, cast))
                .map_err(|error| error.key(key).within(named(key)))?;
            let n_bytes = dtype.n_bytes(&[n]);
            let total = n_bytes.and_then(|n| Some((n, sum.checked_add(n)?)));
            let (n_bytes, next) = total.ok_or_else(|| {
                let message = format!(
                    "{} is not an integer number of bytes, or too large",
                    named(name)
                );
                Error::new(Kind::Unsupported, message).key(key)
            })?;
            sum = next;
            each(dtype, n_bytes);
            Ok(())
        };
        match requested {
            Requested::Listed(request) => request.arrays.iter().try_for_each(|array| {
                add(&array.keys[0].0, &array.name, array.shape.iter().product())
            }),
            Requested::OfRank(request) => request.n_elements().try_for_each(|array| {
                let (key, n) = array?;
                add(key, key, n)
            }),
            Requested::Whole(request) => request
                .arrays()
                .try_for_each(|(name, key, shape)| add(key, name, shape.iter().product())),
        }
    }

    /// A request for tensors as they are, each with its name, and with its key where that is not the name.
    ///
    /// # Errors
    /// There is no such key.
    pub fn whole_request<'a>(
        &self,
        names: impl IntoIterator<Item = &'a str>,
        keys: Option<impl IntoIterator<Item = &'a str>>,
    ) -> Result<WholeRequest> {
        let (mut request, mut near) = (WholeRequest::default(), Near::default());
        let mut keys = keys.map(IntoIterator::into_iter);
        for name in names {
            let key = keys.as_mut().map(|keys| keys.next().unwrap_or(name));
            let found = self.found_near(key.unwrap_or(name), &mut near)?;
            request.add(name, key, found.shape());
        }
        Ok(request)
    }

    /// Sets an unknown dtype of a tensor from the file of a selected copy, which is opened in any case.
    fn set_dtype_from_file(&self, selected: &SelectedCopy<'_>) -> Result<()> {
        if let Some(&number) = self.by_key.get(selected.name) {
            let stored = &self.tensors[number as usize];
            if stored.dtype.get().is_none()
                && let Some((dtype, ..)) = self.open(selected.file)?.tensor(selected.name)
            {
                stored.dtype.get_or_init(|| dtype);
            }
        }
        Ok(())
    }

    /// Number of copies in the plan of a request. Opens no file: only the symbolic part of planning is executed.
    pub fn count_copy_ops(&self, request: &Request) -> Result<usize> {
        let mut chosen_bytes = vec![0; self.files.len()];
        request.arrays.iter().try_fold(0, |n, requested| {
            let found = self.check_requested(requested)?;
            Ok(n + self
                .select(requested, found.as_ref(), &mut chosen_bytes)?
                .len())
        })
    }

    /// Checks keys, shapes and tiles. Returns the tensor if all tiles are of one.
    fn check_requested(&self, requested: &RequestedArray) -> Result<Option<Found<'_>>> {
        let mut last = None;
        for (key, shape) in &requested.keys {
            let found = self.found(key)?;
            if let Some(shape) = shape {
                check_shape(key, &found, shape)?;
            }
            last = Some(found);
        }
        let only = last.filter(|_| match requested.keys.as_slice() {
            [(only, _)] => requested.tiles.iter().all(|(key, _)| key == only),
            _ => false,
        });
        for (key, tile) in &requested.tiles {
            let looked_up;
            let found = if let Some(found) = &only {
                found
            } else {
                looked_up = self.found(key)?;
                &looked_up
            };
            if !tile.global.lies_in(found.shape()) {
                let message = format!(
                    "{} has shape {}; {} is outside",
                    named(key),
                    Dims(found.shape()),
                    tile.global
                );
                return Err(Error::new(Kind::Argument, message).key(key));
            }
        }
        Ok(only)
    }

    /// Selects the copies of an array: each element once, with replicas chosen so that the bytes are spread over the
    /// files. `only` is the tensor of all its tiles, if there is one.
    fn select<'a>(
        &'a self,
        requested: &RequestedArray,
        only: Option<&Found<'a>>,
        chosen_bytes: &mut [u64],
    ) -> Result<Vec<SelectedCopy<'a>>> {
        let mut selected = Vec::new();
        for (key, tile) in &requested.tiles {
            if tile.global.is_empty() {
                continue;
            }
            let looked_up;
            let found = if let Some(found) = only {
                found
            } else {
                looked_up = self.found(key)?;
                &looked_up
            };
            if let Some(file) = found.only_file()
                && matches!(self.file_format(file)?, Format::Safetensors)
            {
                let stored = (found.name(), found.shape());
                select_whole(stored, file, tile, chosen_bytes, &mut selected);
                continue;
            }
            match found {
                Found::InWholeFile(file, entry) => {
                    let grid = Grid::whole(&entry.shape, *file);
                    grid.select(entry.name, tile, chosen_bytes, &mut selected)?;
                }
                Found::Listed(stored) => match &stored.form {
                    Form::Grid(grid) => {
                        grid.select(&stored.key, tile, chosen_bytes, &mut selected)?;
                    }
                    Form::Tiles(tiles) => {
                        tiles.select(stored, tile, chosen_bytes, &mut selected)?;
                    }
                },
            }
        }
        Ok(selected)
    }
}

fn check_size(key: &str, shape: &[u64]) -> Result<()> {
    if n_elements(shape).is_some_and(|n| i64::try_from(n).is_ok()) {
        return Ok(());
    }
    let message = format!("{}: shape {} is too large", named(key), Dims(shape));
    Err(Error::damaged(message).key(key))
}

/// Compares a tensor with the shape that a layout is for.
fn check_shape(key: &str, found: &Found<'_>, shape: &[u64]) -> Result<()> {
    if found.shape() == shape {
        return Ok(());
    }
    let message = format!(
        "{} has shape {}, but the layout is for {}",
        named(key),
        Dims(found.shape()),
        Dims(shape)
    );
    Err(Error::new(Kind::Mismatch, message).key(key))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn stored_twice(key: &str) -> Error {
    Error::damaged(format!("{} is stored twice", named(key))).key(key)
}

fn cast_target(stored: Dtype, cast: Option<Dtype>) -> Result<Dtype> {
    let Some(cast) = cast else { return Ok(stored) };
    if !stored.is_float() {
        return Ok(stored);
    }
    if !can_cast(stored, cast) {
        return Err(Error::new(
            Kind::Unsupported,
            format!("a cast from {stored} to {cast} is not supported"),
        )
        .hint(
            "casts between F64, F32, F16 and BF16 are supported; select other tensors with `keys=`",
        ));
    }
    Ok(cast)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::{ThreadId, current};

    struct Freed(Sender<ThreadId>);

    impl Drop for Freed {
        fn drop(&mut self) {
            let _ = self.0.send(current().id());
        }
    }

    #[test]
    fn a_large_value_is_freed_by_another_thread() {
        for (n_parts, is_here) in [(9_999, true), (10_000, false)] {
            let (sender, receiver) = channel();
            drop_large(n_parts, Freed(sender));
            assert_eq!(receiver.recv().unwrap() == current().id(), is_here);
        }
    }
}
