//! `.metadata` of `torch.distributed.checkpoint`: which tensor consists of which chunks, and where each one lies.
//!
//! ```text
//! Metadata         state_dict_metadata: {name: TensorStorageMetadata | BytesStorageMetadata}, storage_data: {...}, ...
//! tensor           properties (dtype, ...), size, chunks: [{offsets, sizes}]
//! storage_data     {MetadataIndex {fqn, offset}: _StorageInfo {relative_path, offset, length, transform_descriptors}}
//! ```
//!
//! The file is a pickle. It is decoded, never executed. An item of a data file is one file of `torch.save` with one tensor
//! ([`item_tensor`]) or one object.
//!
//! Source: `torch/distributed/checkpoint/metadata.py` and `filesystem.py` of torch 2.15.

mod ahead;
mod alike;
pub mod folder;

use crate::compressed::{decompressed, is_zstd};
use crate::pickle::{Classes, Id, Pickle, Record, Value};
use crate::torch_file::{Leaf, Storage, Tensor, TorchFile, crc_ranges, named_dtype};
use crate::zip::Window;
use ahead::Ahead;
use alike::Alike;
use reshard_core::dtype::{Dtype, n_elements};
use reshard_core::error::Printable;
use reshard_core::header::{MAX_RANK, check_name};
use reshard_core::index::{Index, cell_name};
use reshard_core::listed::Listed;
use reshard_core::region::{Region, row_major_strides};
use reshard_core::shard_file::Format;
use reshard_core::source::{LocalPath, Method, Source};
use reshard_core::stored::StoredTensor;
use reshard_core::tile::Tile;
use reshard_core::{Error, Kind, Result};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Transforms of one item, and different ones in a folder. Each item has the same, at most a few.
const MAX_TRANSFORMS: usize = 16;
/// Of a transform. A text may be shared by all rows, and each one looks it up.
const MAX_TRANSFORM_BYTES: usize = 256;
/// Of the name of a tensor or of a file.
const MAX_NAME_BYTES: usize = 4096;
const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";
/// The classes of which there are millions.
const RECORDS: Classes = &[
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "MetadataIndex"),
    (FILESYSTEM, "_StorageInfo"),
];

/// A decoded `.metadata`. There can be millions of chunks, so a chunk takes a few numbers in long vectors.
#[derive(Debug)]
pub struct Dcp {
    /// Paths of the data files, relative to the folder, as they are in the file: the reader of the folder checks them.
    pub files: Vec<String>,
    /// What was done to the bytes of items before they were written, in the order in which it is undone. The first is
    /// nothing.
    pub transforms: Vec<Vec<String>>,
    /// The tensors, in the order of the file.
    pub tensors: Vec<DcpTensor>,
    /// Everything else, by name: each one is an object of `torch.save`.
    pub objects: Vec<(String, Place)>,
    /// Shapes of tensors of Megatron-Core that are stored in another form.
    pub original_shapes: HashMap<String, Vec<u64>>,
}

/// A tensor and its chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DcpTensor {
    /// Its name.
    pub name: String,
    /// Its element type; the file's name for it, where it is none of ours.
    pub dtype: Result<Dtype, String>,
    /// Its shape in elements.
    pub shape: Vec<u64>,
    /// Its parts. Chunks without elements are left out.
    pub chunks: Chunks,
}

/// The chunks of a tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunks {
    /// Offset and shape of each one, one after the other.
    dims: Vec<u64>,
    places: Vec<Place>,
}

/// A region of a tensor and where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// Its first element in the tensor.
    pub offset: &'a [u64],
    /// Its shape in elements.
    pub shape: &'a [u64],
    /// Where it is stored.
    pub place: Place,
}

/// A range of a data file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The number of the file in [`Dcp::files`].
    pub file: u32,
    /// The number of the transforms in [`Dcp::transforms`].
    pub transforms: u32,
    /// Its first byte.
    pub offset: u64,
    /// How many bytes there are, as stored.
    pub n_bytes: u64,
}

impl Chunks {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// One of them.
    pub fn get(&self, i: usize) -> Chunk<'_> {
        let rank = self.dims.len() / self.places.len() / 2;
        let (offset, shape) = self.dims[2 * rank * i..2 * rank * (i + 1)].split_at(rank);
        Chunk {
            offset,
            shape,
            place: self.places[i],
        }
    }

    /// All of them, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = Chunk<'_>> {
        (0..self.len()).map(|i| self.get(i))
    }
}

impl Dcp {
    /// Decodes a `.metadata`.
    ///
    /// # Errors
    /// `Kind::Damaged` if it contradicts itself, `Kind::Unsupported` for what is refused.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        Self::of(&Pickle::decode_records(bytes, RECORDS)?)
    }

    /// The same of the pickle.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn of(pickle: &Pickle) -> Result<Self> {
        Decoder {
            pickle,
            files: Vec::new(),
            by_path: HashMap::new(),
            transforms: vec![Vec::new()],
            dims: Vec::new(),
            n_listed: 0,
        }
        .metadata()
    }

    /// Where the last item of each file ends, in bytes: a file that ends before is cut short.
    pub fn ends(&self) -> Vec<u64> {
        let mut ends = vec![0; self.files.len()];
        let chunks = self.tensors.iter().flat_map(|tensor| &tensor.chunks.places);
        for place in chunks.chain(self.objects.iter().map(|(_, place)| place)) {
            let end = &mut ends[place.file as usize];
            *end = (*end).max(place.offset.saturating_add(place.n_bytes));
        }
        ends
    }
}

impl Dcp {
    /// The description of a folder in which each rank wrote one of its own, with the chunks that it saved.
    ///
    /// A value that is no tensor is that of the first rank that has it.
    ///
    /// # Errors
    /// Two ranks describe a tensor differently.
    pub fn merged(parts: impl IntoIterator<Item = Self>) -> Result<Self> {
        let mut whole = Self {
            files: Vec::new(),
            transforms: vec![Vec::new()],
            tensors: Vec::new(),
            objects: Vec::new(),
            original_shapes: HashMap::new(),
        };
        let mut numbers: HashMap<String, u32> = HashMap::new();
        let mut known: HashMap<String, usize> = HashMap::new();
        let mut objects = std::collections::HashSet::new();
        for part in parts {
            let mut renumbered = Vec::with_capacity(part.files.len());
            for name in part.files {
                let next = whole.files.len() as u32;
                let number = *numbers.entry(name.clone()).or_insert(next);
                if number == next {
                    whole.files.push(name);
                }
                renumbered.push(number);
            }
            let mut transforms = Vec::with_capacity(part.transforms.len());
            for names in part.transforms {
                transforms.push(number_of(&mut whole.transforms, names));
            }
            let renumber = |place: &mut Place| {
                place.file = renumbered[place.file as usize];
                place.transforms = transforms[place.transforms as usize];
            };
            for mut tensor in part.tensors {
                tensor.chunks.places.iter_mut().for_each(renumber);
                match known.get(&tensor.name) {
                    None => {
                        known.insert(tensor.name.clone(), whole.tensors.len());
                        whole.tensors.push(tensor);
                    }
                    Some(number) => {
                        let first = &mut whole.tensors[*number];
                        if first.shape != tensor.shape || first.dtype != tensor.dtype {
                            let message = format!(
                                "`{}` has the shape {:?} for one rank and {:?} for another, or two dtypes",
                                Printable(&tensor.name),
                                first.shape,
                                tensor.shape
                            );
                            return Err(Error::damaged(message).key(&tensor.name));
                        }
                        first.chunks.dims.append(&mut tensor.chunks.dims);
                        first.chunks.places.append(&mut tensor.chunks.places);
                    }
                }
            }
            for (name, mut place) in part.objects {
                if objects.insert(name.clone()) {
                    renumber(&mut place);
                    whole.objects.push((name, place));
                }
            }
            whole.original_shapes.extend(part.original_shapes);
        }
        Ok(whole)
    }
}

/// The number of some transforms in a list of them; they are added if they are new.
fn number_of(all: &mut Vec<Vec<String>>, names: Vec<String>) -> u32 {
    let known = all.iter().position(|known| *known == names);
    known.unwrap_or_else(|| {
        all.push(names);
        all.len() - 1
    }) as u32
}

/// A part of the path to a value in nested dicts and lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The key of a dict.
    Key(String),
    /// A position in a list, or a key that is a number.
    Number(i64),
}

/// The path of each flattened name, as far as `.metadata` has it: `a.b.0` is `a`, `b`, 0 or `a.b`, 0 or another.
///
/// # Errors
/// As [`Dcp::decode`].
pub fn paths(bytes: &[u8]) -> Result<Vec<(String, Vec<Step>)>> {
    let pickle = Pickle::decode_records(bytes, RECORDS)?;
    let root = pickle.call(pickle.root(), METADATA, "Metadata");
    let entries = root
        .and_then(|root| pickle.attribute(root, "planner_data"))
        .and_then(|id| pickle.items(id))
        .unwrap_or_default();
    let step = |id: &Id| match pickle.get(*id) {
        Value::Text(text) => Some(Step::Key(text.to_owned())),
        Value::Int(int) => Some(Step::Number(int)),
        _ => None,
    };
    // Names and lists of steps can be shared by many entries: the whole is limited.
    let mut left = bytes.len().saturating_mul(16).saturating_add(8 << 20);
    let mut found = Vec::new();
    for [name, path] in entries {
        // What has another form belongs to another planner.
        let (Some(name), Some(path)) = (pickle.text(*name), pickle.sequence(*path)) else {
            continue;
        };
        let texts = path.iter().filter_map(|id| pickle.text(*id));
        let n_bytes = texts.fold(name.len(), |sum, text| sum.saturating_add(text.len()));
        left = left
            .checked_sub(n_bytes.saturating_add(32 * (path.len() + 1)))
            .ok_or_else(|| Error::new(Kind::Unsupported, "its paths unfold into too much"))?;
        if let Some(steps) = path.iter().map(step).collect::<Option<Vec<_>>>() {
            found.push((name.to_owned(), steps));
        }
    }
    Ok(found)
}

struct Decoder<'a> {
    pickle: &'a Pickle,
    files: Vec<String>,
    by_path: HashMap<&'a str, u32>,
    transforms: Vec<Vec<String>>,
    /// For a size that is read and used at once.
    dims: Vec<u64>,
    /// Chunks of all tensors. A list of chunks can be shared by many tensors, in a file that no writer writes.
    n_listed: usize,
}

fn check_bytes(what: &str, text: &str, most: usize) -> Result<()> {
    if text.len() <= most {
        return Ok(());
    }
    let message = format!("{what} has {} bytes, at most {most} are read", text.len());
    Err(Error::new(Kind::Unsupported, message))
}

/// An entry of `storage_data`: the number of its name, its offset and its place.
struct Row {
    name: u32,
    offset: Option<Id>,
    place: Place,
}

/// `storage_data`, sorted by name. The `index` of a key is a hint and not compared.
struct Rows<'a> {
    by_name: HashMap<&'a str, u32>,
    sorted: Vec<Row>,
    /// Where the rows of each name begin.
    starts: Vec<usize>,
}

/// The places of one name, sorted by offset.
#[derive(Default)]
struct Places {
    dims: Vec<u64>,
    /// The range of the offset in `dims`, if there is one.
    places: Vec<(Option<(usize, usize)>, Place)>,
}

impl Places {
    fn find(&self, offset: Option<&[u64]>) -> Option<Place> {
        let found = self.places.binary_search_by(|(range, _)| {
            range.map(|(from, to)| &self.dims[from..to]).cmp(&offset)
        });
        found.ok().map(|i| self.places[i].1)
    }
}

impl<'a> Decoder<'a> {
    fn metadata(mut self) -> Result<Dcp> {
        let pickle = self.pickle;
        let root = pickle.call(pickle.root(), METADATA, "Metadata");
        let root = root.ok_or_else(|| {
            Error::damaged("it is a pickle, but no metadata of `torch.distributed.checkpoint`")
        })?;
        let rows = self.rows(root)?;
        // Each name's once, also those that no tensor uses.
        for name in 0..rows.starts.len() - 1 {
            if rows.starts[name + 1] - rows.starts[name] > 1 {
                self.places(&rows, name as u32)?;
            }
        }
        let entries = self.attribute(root, "state_dict_metadata")?;
        let entries = pickle
            .items(entries)
            .ok_or_else(|| Error::damaged("`state_dict_metadata` is no dict"))?;
        let (mut tensors, mut objects) = (Vec::new(), Vec::new());
        let mut seen = std::collections::HashSet::with_capacity(entries.len());
        for [key, value] in entries {
            let name = pickle
                .text(*key)
                .ok_or_else(|| Error::damaged("the name of a tensor is no text"))?;
            if !seen.insert(name) {
                return Err(Error::damaged(format!(
                    "`{}` is listed twice",
                    Printable(name)
                )));
            }
            self.entry(name, *value, &rows, &mut tensors, &mut objects)
                .map_err(|error| {
                    error
                        .key(name)
                        .within(format_args!("`{}`", Printable(name)))
                })?;
        }
        let original_shapes = self.original_shapes(root)?;
        Ok(Dcp {
            files: self.files,
            transforms: self.transforms,
            tensors,
            objects,
            original_shapes,
        })
    }

    fn entry(
        &mut self,
        name: &str,
        id: Id,
        rows: &Rows<'_>,
        tensors: &mut Vec<DcpTensor>,
        objects: &mut Vec<(String, Place)>,
    ) -> Result<()> {
        let pickle = self.pickle;
        let record = pickle
            .record(id)
            .ok_or_else(|| Error::damaged("its description is no record"))?;
        match pickle.name(record.function) {
            Some((METADATA, "BytesStorageMetadata")) => {
                let places = self.places_of(rows, name)?;
                let place = places.find(None).or_else(|| places.find(Some(&[])));
                let place = place.ok_or_else(|| Error::damaged("it has no place in a file"))?;
                objects.push((name.to_owned(), place));
                Ok(())
            }
            Some((METADATA, "TensorStorageMetadata")) => {
                check_name(name)?;
                let places = self.places_of(rows, name)?;
                let tensor = self.tensor(name, record, &places)?;
                tensors.push(tensor);
                Ok(())
            }
            _ => Err(Error::new(
                Kind::Unsupported,
                "its description is of an unknown type",
            )),
        }
    }

    fn tensor(&mut self, name: &str, record: Record<'_>, places: &Places) -> Result<DcpTensor> {
        let pickle = self.pickle;
        let mut shape = Vec::new();
        self.extents(self.attribute(record, "size")?, &mut shape)?;
        if shape.len() > MAX_RANK || n_elements(&shape).is_none_or(|n| n > i64::MAX as u64) {
            return Err(Error::damaged("its shape is too large"));
        }
        let properties = self.attribute(record, "properties")?;
        let properties = pickle
            .record(properties)
            .ok_or_else(|| Error::damaged("its properties are no record"))?;
        // A tuple of fields, dtype first; a dict in files of old versions.
        let dtype = properties
            .state
            .and_then(|state| match pickle.sequence(state) {
                Some(fields) => fields.first().copied(),
                None => pickle.item(state, "dtype"),
            });
        let dtype = dtype.ok_or_else(|| Error::damaged("its properties have no dtype"))?;
        let dtype = match named_dtype(pickle, dtype) {
            Ok(dtype) => Ok(dtype),
            Err(error) if error.kind() == Kind::Unsupported => Err(error.message().to_owned()),
            Err(error) => return Err(error),
        };
        let chunks = self.attribute(record, "chunks")?;
        let listed = pickle
            .sequence(chunks)
            .ok_or_else(|| Error::damaged("its chunks are no list"))?;
        self.n_listed += listed.len();
        if self.n_listed > pickle.len() {
            let message = "its chunks are shared by more tensors than any writer does";
            return Err(Error::new(Kind::Unsupported, message));
        }
        let rank = shape.len();
        let mut chunks = Chunks {
            dims: Vec::with_capacity(2 * rank * listed.len().min(places.places.len())),
            places: Vec::with_capacity(listed.len().min(places.places.len())),
        };
        let mut dims = std::mem::take(&mut self.dims);
        for id in listed {
            let chunk = pickle.call(*id, METADATA, "ChunkStorageMetadata");
            let chunk = chunk.ok_or_else(|| Error::damaged("a chunk of an unknown type"))?;
            dims.clear();
            self.extents(self.attribute(chunk, "offsets")?, &mut dims)?;
            let n_offsets = dims.len();
            self.extents(self.attribute(chunk, "sizes")?, &mut dims)?;
            let (offset, sizes) = dims.split_at(n_offsets);
            let lies_inside = offset.len() == rank
                && sizes.len() == rank
                && (0..rank).all(|d| {
                    offset[d]
                        .checked_add(sizes[d])
                        .is_some_and(|end| end <= shape[d])
                });
            if !lies_inside {
                return Err(Error::damaged(format!(
                    "its chunk at {offset:?} of shape {sizes:?} does not lie in its shape {shape:?}"
                )));
            }
            if sizes.contains(&0) {
                continue;
            }
            let place = places.find(Some(offset)).ok_or_else(|| {
                Error::damaged(format!("its chunk at {offset:?} has no place in a file"))
            })?;
            chunks.dims.extend_from_slice(&dims);
            chunks.places.push(place);
        }
        self.dims = dims;
        Ok(DcpTensor {
            name: name.to_owned(),
            dtype,
            shape,
            chunks,
        })
    }

    fn rows(&mut self, root: Record<'a>) -> Result<Rows<'a>> {
        let pickle = self.pickle;
        let entries = self.attribute(root, "storage_data")?;
        let entries = pickle
            .items(entries)
            .ok_or_else(|| Error::damaged("`storage_data` is no dict"))?;
        let mut by_name: HashMap<&str, u32> = HashMap::new();
        let mut rows = Vec::with_capacity(entries.len());
        for [key, value] in entries {
            let index = pickle.call(*key, METADATA, "MetadataIndex");
            let index = index
                .ok_or_else(|| Error::damaged("a key of `storage_data` is no `MetadataIndex`"))?;
            let name = self.attribute(index, "fqn")?;
            let name = pickle
                .text(name)
                .ok_or_else(|| Error::damaged("the name of a tensor is no text"))?;
            check_bytes("the name of a tensor", name, MAX_NAME_BYTES)?;
            let offset = pickle.attribute(index, "offset");
            let offset = offset.filter(|id| !matches!(pickle.get(*id), Value::None));
            let place = self.place(*value).map_err(|error| {
                error
                    .key(name)
                    .within(format_args!("`{}`", Printable(name)))
            })?;
            let next = by_name.len() as u32;
            let name = *by_name.entry(name).or_insert(next);
            rows.push(Row {
                name,
                offset,
                place,
            });
        }
        rows.sort_by_key(|row| row.name);
        let names = 0..=by_name.len() as u32;
        let starts = names.map(|name| rows.partition_point(|row| row.name < name));
        Ok(Rows {
            starts: starts.collect(),
            by_name,
            sorted: rows,
        })
    }

    fn places_of(&self, rows: &Rows<'_>, name: &str) -> Result<Places> {
        let number = rows.by_name.get(name);
        number.map_or_else(
            || Ok(Places::default()),
            |number| self.places(rows, *number),
        )
    }

    /// # Errors
    /// One offset has two places.
    fn places(&self, rows: &Rows<'_>, name: u32) -> Result<Places> {
        let rows_of = &rows.sorted[rows.starts[name as usize]..rows.starts[name as usize + 1]];
        let mut found = Places::default();
        for row in rows_of {
            let from = found.dims.len();
            if let Some(id) = row.offset {
                self.extents(id, &mut found.dims)?;
            }
            let range = row.offset.map(|_| (from, found.dims.len()));
            found.places.push((range, row.place));
        }
        let dims = &found.dims;
        let offset = |range: Option<(usize, usize)>| range.map(|(from, to)| &dims[from..to]);
        found
            .places
            .sort_unstable_by(|(a, _), (b, _)| offset(*a).cmp(&offset(*b)));
        let mut pairs = found.places.windows(2);
        if pairs.any(|pair| offset(pair[0].0) == offset(pair[1].0)) {
            let names = rows.by_name.iter();
            let mut names = names.filter(|(_, number)| **number == name);
            let name = names.next().map_or("", |(name, _)| name);
            return Err(Error::damaged(format!(
                "`{}` has two places for one chunk",
                Printable(name)
            )));
        }
        Ok(found)
    }

    fn place(&mut self, id: Id) -> Result<Place> {
        let pickle = self.pickle;
        let info = pickle.call(id, FILESYSTEM, "_StorageInfo");
        let info =
            info.ok_or_else(|| Error::damaged("the place of a chunk is no `_StorageInfo`"))?;
        let path = self.attribute(info, "relative_path")?;
        let path = pickle
            .text(path)
            .ok_or_else(|| Error::damaged("the path of a file is no text"))?;
        check_bytes("the path of a file", path, MAX_NAME_BYTES)?;
        let number = |name: &str| -> Result<u64> {
            let int = pickle.int(self.attribute(info, name)?);
            let int =
                int.ok_or_else(|| Error::damaged(format!("the {name} of a chunk is no integer")))?;
            u64::try_from(int)
                .map_err(|_| Error::damaged(format!("the {name} of a chunk is {int}")))
        };
        let (offset, n_bytes) = (number("offset")?, number("length")?);
        let mut transforms = 0;
        if let Some(id) = pickle.attribute(info, "transform_descriptors")
            && !matches!(pickle.get(id), Value::None)
        {
            let listed = pickle
                .sequence(id)
                .ok_or_else(|| Error::damaged("the transforms of a chunk are no list"))?;
            let mut names = Vec::new();
            for id in listed.iter().take(MAX_TRANSFORMS + 1) {
                let name = pickle.text(*id);
                let name = name.ok_or_else(|| Error::damaged("a transform that is no text"))?;
                check_bytes("a transform", name, MAX_TRANSFORM_BYTES)?;
                names.push(name.to_owned());
            }
            transforms = number_of(&mut self.transforms, names);
            if listed.len() > MAX_TRANSFORMS || self.transforms.len() > MAX_TRANSFORMS {
                return Err(Error::new(Kind::Unsupported, "it has too many transforms"));
            }
        }
        let n_files = self.files.len() as u32;
        let file = *self.by_path.entry(path).or_insert(n_files);
        if file == n_files {
            self.files.push(path.to_owned());
        }
        Ok(Place {
            file,
            transforms,
            offset,
            n_bytes,
        })
    }

    /// Megatron-Core before 0.14 stores some states of its optimizer in another shape and says here what it was.
    fn original_shapes(&self, root: Record<'_>) -> Result<HashMap<String, Vec<u64>>> {
        let mut shapes = HashMap::new();
        let Some(entries) = self
            .pickle
            .attribute(root, "mcore_data")
            .and_then(|id| self.pickle.items(id))
        else {
            return Ok(shapes);
        };
        for [key, value] in entries {
            if let (Some(name), Some(shape)) = (
                self.pickle.text(*key),
                self.pickle
                    .item(*value, "nd_reformulated_orig_global_shape"),
            ) {
                let mut dims = Vec::new();
                self.extents(shape, &mut dims)?;
                shapes.insert(name.to_owned(), dims);
            }
        }
        Ok(shapes)
    }

    fn attribute(&self, record: Record<'_>, name: &str) -> Result<Id> {
        self.pickle
            .attribute(record, name)
            .ok_or_else(|| Error::damaged(format!("`{name}` is missing")))
    }

    fn extents(&self, id: Id, to: &mut Vec<u64>) -> Result<()> {
        let ids = self
            .pickle
            .sequence(id)
            .ok_or_else(|| Error::damaged("a size or offset that is no tuple"))?;
        if ids.len() > MAX_RANK {
            return Err(Error::damaged("a size or offset of too many dims"));
        }
        for id in ids {
            let extent = self.pickle.int(*id).and_then(|int| u64::try_from(int).ok());
            to.push(extent.ok_or_else(|| Error::damaged("a size or offset that is no count"))?);
        }
        Ok(())
    }
}

/// The index of a folder. No data file is opened yet.
///
/// # Errors
/// A file's path leaves the folder; chunks of a tensor overlap.
pub fn index_of(dcp: &Arc<Dcp>, folder: &Path, method: Method) -> Result<Index> {
    let mut index = Index::new();
    let paths: Vec<PathBuf> = dcp
        .files
        .iter()
        .map(|name| path_in(folder, name))
        .collect::<Result<_>>()?;
    let Items {
        by_file,
        compressed,
        grids,
    } = Items::of(dcp)?;
    for (path, mut items) in paths.iter().zip(by_file) {
        items.shrink_to_fit();
        // So that those that follow each other are read together.
        items.sort_by_key(|item| item.place(dcp).offset);
        let dcp = Arc::clone(dcp);
        let reader = move |source: &Source| {
            let placed = items.iter().map(|item| (*item, item.place(&dcp)));
            listed(source, &dcp, placed)
        };
        let format = Format::Listed(Arc::new(reader));
        index.add_local(path.clone(), false, method, format);
    }
    // The items of a compressed file are unpacked one by one: to the index each one is a file of its own.
    let mut unpacked: HashMap<(u32, u32), u32> = HashMap::new();
    for item in compressed {
        let path = paths[item.place(dcp).file as usize].clone();
        let number = add_compressed(&mut index, dcp, item, path, method);
        unpacked.insert((item.tensor, item.chunk), number);
    }
    for (number, (tensor, grid)) in dcp.tensors.iter().zip(grids).enumerate() {
        let Ok(dtype) = tensor.dtype else {
            continue;
        };
        let file = |n: usize| {
            let place = tensor.chunks.places[n];
            if place.transforms == 0 {
                return place.file;
            }
            unpacked[&(number as u32, n as u32)]
        };
        if let Some(cells) = grid {
            let files = cells.chunks.iter().map(|chunk| file(*chunk as usize));
            index.add_grid(&tensor.name, dtype, cells.bounds, files.collect())?;
            continue;
        }
        let original = dcp.original_shapes.get(&tensor.name);
        let stored = tensor.chunks.iter().enumerate().map(|(n, chunk)| {
            let tiles = tiles_of(tensor, original, chunk)?;
            let stored = StoredTensor {
                file: file(n),
                name: cell_name(n as u64, &tensor.name),
                shape: chunk.shape.to_vec(),
            };
            Ok((stored, tiles))
        });
        let stored = stored.collect::<Result<Vec<_>>>()?;
        let shape = original.unwrap_or(&tensor.shape).clone();
        index.add_tiles(&tensor.name, dtype, shape, BTreeMap::new(), stored, false)?;
    }
    Ok(index)
}

/// The items with the chunks of all tensors.
struct Items {
    by_file: Vec<Vec<Item>>,
    compressed: Vec<Item>,
    /// For each tensor the grid of its chunks, if they form one.
    grids: Vec<Option<Cells>>,
}

impl Items {
    /// # Errors
    /// An item is transformed in a way that is not known.
    fn of(dcp: &Dcp) -> Result<Self> {
        let mut found = Self {
            by_file: dcp.files.iter().map(|_| Vec::new()).collect(),
            compressed: Vec::new(),
            grids: Vec::with_capacity(dcp.tensors.len()),
        };
        for (tensor, described) in dcp.tensors.iter().enumerate() {
            let is_read = described.dtype.is_ok();
            let is_stored_otherwise = dcp.original_shapes.contains_key(&described.name);
            let grid = (is_read && !is_stored_otherwise)
                .then(|| Cells::of(described))
                .flatten();
            let places = if is_read {
                &described.chunks.places[..]
            } else {
                &[]
            };
            for n in 0..places.len() as u32 {
                let chunk = grid.as_ref().map_or(n, |grid| grid.chunks[n as usize]);
                let place = places[chunk as usize];
                let item = Item {
                    tensor: tensor as u32,
                    chunk,
                    number: n,
                };
                let transforms = &dcp.transforms[place.transforms as usize];
                if transforms.is_empty() {
                    found.by_file[place.file as usize].push(item);
                } else if is_zstd(transforms) {
                    found.compressed.push(item);
                } else {
                    let message = format!(
                        "`{}` is transformed by {}, which is not known",
                        Printable(&described.name),
                        Printable(&transforms.join(", "))
                    );
                    return Err(Error::new(Kind::Unsupported, message).key(&described.name));
                }
            }
            found.grids.push(grid);
        }
        Ok(found)
    }
}

/// Adds a compressed item as a file. Returns its number.
fn add_compressed(
    index: &mut Index,
    dcp: &Arc<Dcp>,
    item: Item,
    path: PathBuf,
    method: Method,
) -> u32 {
    let (opened, place, most) = (LocalPath::of(&path), item.place(dcp), item.max_bytes(dcp));
    let open = move || {
        let source = opened.open(false, method)?;
        decompressed(source, place.offset, place.n_bytes, most)
    };
    let dcp = Arc::clone(dcp);
    let format = Format::Listed(Arc::new(move |source: &Source| {
        let place = Place {
            file: 0,
            transforms: 0,
            offset: 0,
            n_bytes: source.n_bytes(),
        };
        listed(source, &dcp, std::iter::once((item, place)))
    }));
    index.add_source(path, format, open)
}

/// The tiles of a chunk; `original` is the shape of a tensor of Megatron-Core that is stored in another form.
fn tiles_of(
    tensor: &DcpTensor,
    original: Option<&Vec<u64>>,
    chunk: Chunk<'_>,
) -> Result<Vec<Tile>> {
    if let Some(shape) = original {
        return flattened_tiles(shape, &tensor.shape, chunk)
            .map_err(|error| error.key(&tensor.name));
    }
    Ok(vec![Tile {
        global: Region::new(chunk.offset.to_vec(), chunk.shape.to_vec())?,
        local_offset: 0,
        local_strides: row_major_strides(chunk.shape),
    }])
}

/// The chunks of a tensor that form a grid: the index then needs a number for each one.
struct Cells {
    /// For each dim the bounds of its parts.
    bounds: Vec<Vec<u64>>,
    /// The chunk in each cell, row-major.
    chunks: Vec<u32>,
}

impl Cells {
    fn of(tensor: &DcpTensor) -> Option<Self> {
        let n = tensor.chunks.len();
        if n == 0 {
            return None;
        }
        let bounds: Vec<Vec<u64>> = (0..tensor.shape.len())
            .map(|d| {
                let mut starts: Vec<u64> =
                    tensor.chunks.iter().map(|chunk| chunk.offset[d]).collect();
                starts.sort_unstable();
                starts.dedup();
                starts.push(tensor.shape[d]);
                starts
            })
            .collect();
        let n_cells = bounds
            .iter()
            .try_fold(1_usize, |n, bounds| n.checked_mul(bounds.len() - 1));
        if n_cells != Some(n) || bounds.iter().any(|bounds| bounds[0] != 0) {
            return None;
        }
        let mut chunks = vec![u32::MAX; n];
        for (i, chunk) in tensor.chunks.iter().enumerate() {
            let mut cell = 0;
            for (d, bounds) in bounds.iter().enumerate() {
                let part = bounds.binary_search(&chunk.offset[d]).ok()?;
                if bounds.get(part + 1) != Some(&(chunk.offset[d] + chunk.shape[d])) {
                    return None;
                }
                cell = cell * (bounds.len() - 1) + part;
            }
            if chunks[cell] != u32::MAX {
                return None;
            }
            chunks[cell] = i as u32;
        }
        Some(Self { bounds, chunks })
    }
}

/// The tiles of a chunk of a tensor of Megatron-Core that is stored in another form.
///
/// A tensor `[X, Y]` that is cut into blocks `[x, y]` is stored as `[X / x, Y / y, x * y]`: each block is flattened, and
/// the ranks that share it store ranges of it. A range of a flattened block is a few boxes of the tensor.
///
/// # Errors
/// The two shapes do not belong together.
fn flattened_tiles(shape: &[u64], stored: &[u64], chunk: Chunk<'_>) -> Result<Vec<Tile>> {
    let contradiction = || {
        Error::damaged(format!(
            "a tensor of shape {shape:?} is stored as {stored:?}, with a chunk of shape {:?}",
            chunk.shape
        ))
    };
    let (Some((&block_len, grid)), Some((&len, ones))) =
        (stored.split_last(), chunk.shape.split_last())
    else {
        return Err(contradiction());
    };
    let is_grid = grid.len() == shape.len()
        && ones.iter().all(|&one| one == 1)
        && shape
            .iter()
            .zip(grid)
            .all(|(&n, &parts)| parts > 0 && n % parts == 0);
    if !is_grid {
        return Err(contradiction());
    }
    let block: Vec<u64> = shape.iter().zip(grid).map(|(n, parts)| n / parts).collect();
    if n_elements(&block) != Some(block_len) {
        return Err(contradiction());
    }
    let strides = row_major_strides(&block);
    let first: Vec<u64> = chunk
        .offset
        .iter()
        .zip(&block)
        .map(|(at, n)| at * n)
        .collect();
    let (start, end) = (chunk.offset[shape.len()], chunk.offset[shape.len()] + len);
    let mut tiles = Vec::new();
    let mut at = start;
    while at < end {
        // The largest box that begins here: whole rows of the outermost dim that is at its start.
        let mut dim = block.len();
        while dim > 0
            && at % (strides[dim - 1] * block[dim - 1]) == 0
            && at + strides[dim - 1] * block[dim - 1] <= end
        {
            dim -= 1;
        }
        let (mut offset, mut extent) = (first.clone(), vec![1; block.len()]);
        for d in 0..block.len() {
            offset[d] += at / strides[d] % block[d];
        }
        extent[dim..].copy_from_slice(&block[dim..]);
        let mut n = extent.iter().product::<u64>();
        if dim > 0 {
            let inner = strides[dim - 1];
            let rows = (block[dim - 1] - at / inner % block[dim - 1]).min((end - at) / inner);
            extent[dim - 1] = rows;
            n = rows * inner;
        }
        tiles.push(Tile {
            global: Region::new(offset, extent)?,
            local_offset: at - start,
            local_strides: strides.clone(),
        });
        at += n;
    }
    Ok(tiles)
}

/// A chunk that one item of a data file holds.
#[derive(Debug, Clone, Copy)]
struct Item {
    tensor: u32,
    chunk: u32,
    /// That of the cell if the chunks form a grid, else that of the chunk.
    number: u32,
}

impl Item {
    fn place(self, dcp: &Dcp) -> Place {
        dcp.tensors[self.tensor as usize].chunks.places[self.chunk as usize]
    }

    /// Bytes that the item can have: its data, and a generous frame.
    fn max_bytes(self, dcp: &Dcp) -> u64 {
        let tensor = &dcp.tensors[self.tensor as usize];
        let shape = tensor.chunks.get(self.chunk as usize).shape;
        let n_bytes = tensor
            .dtype
            .as_ref()
            .ok()
            .and_then(|dtype| dtype.n_bytes(shape));
        n_bytes.unwrap_or(0).saturating_add(1 << 20)
    }

    /// The name under which the index finds it in its file.
    fn name(self, key: &str) -> String {
        cell_name(u64::from(self.number), key)
    }
}

/// Opens the items of a data file.
fn listed(
    source: &Source,
    dcp: &Dcp,
    items: impl Iterator<Item = (Item, Place)> + Clone,
) -> Result<Listed> {
    let mut tensors = Vec::new();
    let mut ranges = Vec::new();
    let (mut ahead, mut alike) = (Ahead::default(), Alike::default());
    let mut places = items.clone().map(|(_, place)| place);
    for (item, place) in items {
        ahead.read(source, places.clone())?;
        places.next();
        let described = &dcp.tensors[item.tensor as usize];
        let key = &described.name;
        let dtype = described.dtype.clone().map_err(Error::damaged)?;
        let shape = described.chunks.get(item.chunk as usize).shape;
        let whole = ahead.whole(&place);
        let known = whole.and_then(|whole| alike.find(whole, dtype, shape, place.offset));
        let (storage, tensor) = if let Some(known) = known {
            known
        } else {
            let window = ahead.window(source, &place)?;
            let (storage, tensor) = item_tensor(window, dtype, shape)
                .map_err(|error| error.key(key).within(format_args!("`{}`", Printable(key))))?;
            if let Some(whole) = whole {
                alike.keep(window, whole, &storage, &tensor);
            }
            (storage, tensor)
        };
        let storages = [storage];
        ranges.extend(crc_ranges(&storages));
        tensors.push(
            Tensor {
                storage: 0,
                ..tensor
            }
            .listed(item.name(key), &storages),
        );
    }
    // Two tensors never share an item, so ranges that are equal are one item listed twice.
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup();
    Listed::new(tensors, ranges, source.n_bytes())
}

/// The path of a data file: one plain name, or names of folders below the folder.
fn path_in(folder: &Path, name: &str) -> Result<PathBuf> {
    let is_plain = !name.is_empty()
        && !name.contains(['\0', '\\'])
        && name
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..");
    if !is_plain {
        let message = format!(
            "a data file has the path `{}`, which is not a plain path inside the folder",
            Printable(name)
        );
        return Err(Error::damaged(message));
    }
    Ok(folder.join(name))
}

/// The one tensor of an item, and its storage.
///
/// # Errors
/// The item is no file of `torch.save`, holds something else, or a tensor of another dtype or shape than `.metadata` says.
pub fn item_tensor(window: Window<'_>, dtype: Dtype, shape: &[u64]) -> Result<(Storage, Tensor)> {
    let file = TorchFile::read(window)?;
    let mut leaves = file.leaves()?;
    let (Some((path, Leaf::Tensor(tensor))), true) = (leaves.pop(), leaves.is_empty()) else {
        return Err(Error::damaged("the item does not hold one tensor"));
    };
    if !path.is_empty() || tensor.dtype != dtype || tensor.shape != shape {
        let message = format!(
            "{dtype} {shape:?} was expected, {} {:?} is stored",
            tensor.dtype, tensor.shape
        );
        return Err(Error::new(Kind::Mismatch, message));
    }
    Ok((file.storages()[tensor.storage].clone(), tensor))
}
