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

use crate::compressed::{decompressed, is_zstd};
use crate::pickle::{Id, Pickle, Record};
use crate::torch_file::{Leaf, Storage, Tensor, TorchFile, crc_ranges, named_dtype};
use crate::zip::Window;
use reshard_core::dtype::{Dtype, n_elements};
use reshard_core::error::Printable;
use reshard_core::header::{MAX_RANK, check_name};
use reshard_core::index::Index;
use reshard_core::listed::Listed;
use reshard_core::region::{Region, row_major_strides};
use reshard_core::shard_file::Format;
use reshard_core::source::{Method, Source};
use reshard_core::stored::StoredTensor;
use reshard_core::tile::Tile;
use reshard_core::{Error, Kind, Result};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const METADATA: &str = "torch.distributed.checkpoint.metadata";

/// A decoded `.metadata`.
#[derive(Debug)]
pub struct Dcp {
    /// Paths of the data files, relative to the folder, as they are in the file: the reader of the folder checks them.
    pub files: Vec<String>,
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
    pub chunks: Vec<Chunk>,
}

/// A region of a tensor and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Its first element in the tensor.
    pub offset: Vec<u64>,
    /// Its shape in elements.
    pub shape: Vec<u64>,
    /// Where it is stored.
    pub place: Place,
}

/// A range of a data file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The number of the file in [`Dcp::files`].
    pub file: u32,
    /// Its first byte.
    pub offset: u64,
    /// How many bytes there are, as stored.
    pub n_bytes: u64,
    /// What was done to the bytes before they were written, in the order in which it is undone.
    pub transforms: Vec<String>,
}

impl Dcp {
    /// Decodes a `.metadata`.
    ///
    /// # Errors
    /// `Kind::Damaged` if it contradicts itself, `Kind::Unsupported` for what is refused.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let pickle = Pickle::decode(bytes)?;
        Decoder {
            pickle: &pickle,
            files: Vec::new(),
            by_path: HashMap::new(),
        }
        .metadata()
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
            for mut tensor in part.tensors {
                for chunk in &mut tensor.chunks {
                    chunk.place.file = renumbered[chunk.place.file as usize];
                }
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
                        first.chunks.append(&mut tensor.chunks);
                    }
                }
            }
            for (name, mut place) in part.objects {
                if objects.insert(name.clone()) {
                    place.file = renumbered[place.file as usize];
                    whole.objects.push((name, place));
                }
            }
            whole.original_shapes.extend(part.original_shapes);
        }
        Ok(whole)
    }
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
    let pickle = Pickle::decode(bytes)?;
    let root = pickle.call(pickle.root(), METADATA, "Metadata");
    let entries = root
        .and_then(|root| pickle.attribute(root, "planner_data"))
        .and_then(|id| pickle.items(id))
        .unwrap_or_default();
    let step = |id: &Id| match pickle.get(*id) {
        crate::pickle::Value::Text(text) => Some(Step::Key(text.to_string())),
        crate::pickle::Value::Int(int) => Some(Step::Number(*int)),
        _ => None,
    };
    let path = |(name, path): &(Id, Id)| {
        let name = pickle.text(*name)?.to_owned();
        let steps = pickle.sequence(*path)?.iter().map(step);
        Some((name, steps.collect::<Option<Vec<_>>>()?))
    };
    // What has another form belongs to another planner.
    Ok(entries.iter().filter_map(path).collect())
}

struct Decoder<'a> {
    pickle: &'a Pickle,
    files: Vec<String>,
    by_path: HashMap<&'a str, u32>,
}

type Places<'a> = HashMap<(&'a str, Option<Vec<u64>>), Place>;

impl<'a> Decoder<'a> {
    fn metadata(mut self) -> Result<Dcp> {
        let pickle = self.pickle;
        let root = pickle.call(pickle.root(), METADATA, "Metadata");
        let root = root.ok_or_else(|| {
            Error::damaged("it is a pickle, but no metadata of `torch.distributed.checkpoint`")
        })?;
        let places = self.places(root)?;
        let entries = self.attribute(root, "state_dict_metadata")?;
        let entries = pickle
            .items(entries)
            .ok_or_else(|| Error::damaged("`state_dict_metadata` is no dict"))?;
        let (mut tensors, mut objects) = (Vec::new(), Vec::new());
        let mut seen = std::collections::HashSet::with_capacity(entries.len());
        for (key, value) in entries {
            let name = pickle
                .text(*key)
                .ok_or_else(|| Error::damaged("the name of a tensor is no text"))?;
            if !seen.insert(name) {
                return Err(Error::damaged(format!(
                    "`{}` is listed twice",
                    Printable(name)
                )));
            }
            self.entry(name, *value, &places, &mut tensors, &mut objects)
                .map_err(|error| {
                    error
                        .key(name)
                        .within(format_args!("`{}`", Printable(name)))
                })?;
        }
        let original_shapes = self.original_shapes(root)?;
        Ok(Dcp {
            files: self.files,
            tensors,
            objects,
            original_shapes,
        })
    }

    fn entry(
        &self,
        name: &str,
        id: Id,
        places: &Places<'_>,
        tensors: &mut Vec<DcpTensor>,
        objects: &mut Vec<(String, Place)>,
    ) -> Result<()> {
        let pickle = self.pickle;
        let record = pickle
            .record(id)
            .ok_or_else(|| Error::damaged("its description is no record"))?;
        match pickle.name(record.function) {
            Some((METADATA, "BytesStorageMetadata")) => {
                let place = places
                    .get(&(name, None))
                    .or_else(|| places.get(&(name, Some(Vec::new()))));
                let place = place.ok_or_else(|| Error::damaged("it has no place in a file"))?;
                objects.push((name.to_owned(), place.clone()));
                Ok(())
            }
            Some((METADATA, "TensorStorageMetadata")) => {
                check_name(name)?;
                let tensor = self.tensor(name, record, places)?;
                tensors.push(tensor);
                Ok(())
            }
            _ => Err(Error::new(
                Kind::Unsupported,
                "its description is of an unknown type",
            )),
        }
    }

    fn tensor(&self, name: &str, record: &Record, places: &Places<'_>) -> Result<DcpTensor> {
        let pickle = self.pickle;
        let shape = self.extents(self.attribute(record, "size")?)?;
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
        let mut chunks = Vec::with_capacity(listed.len());
        for id in listed {
            let chunk = pickle.call(*id, METADATA, "ChunkStorageMetadata");
            let chunk = chunk.ok_or_else(|| Error::damaged("a chunk of an unknown type"))?;
            let offset = self.extents(self.attribute(chunk, "offsets")?)?;
            let sizes = self.extents(self.attribute(chunk, "sizes")?)?;
            let lies_inside = offset.len() == shape.len()
                && sizes.len() == shape.len()
                && (0..shape.len()).all(|d| {
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
            let place = places.get(&(name, Some(offset.clone())));
            let place = place.ok_or_else(|| {
                Error::damaged(format!("its chunk at {offset:?} has no place in a file"))
            })?;
            chunks.push(Chunk {
                offset,
                shape: sizes,
                place: place.clone(),
            });
        }
        Ok(DcpTensor {
            name: name.to_owned(),
            dtype,
            shape,
            chunks,
        })
    }

    /// `storage_data`: by name and offset. The `index` of a key is a hint and not compared.
    fn places(&mut self, root: &'a Record) -> Result<Places<'a>> {
        let pickle = self.pickle;
        let entries = self.attribute(root, "storage_data")?;
        let entries = pickle
            .items(entries)
            .ok_or_else(|| Error::damaged("`storage_data` is no dict"))?;
        let mut places = HashMap::with_capacity(entries.len());
        for (key, value) in entries {
            let index = pickle.call(*key, METADATA, "MetadataIndex");
            let index = index
                .ok_or_else(|| Error::damaged("a key of `storage_data` is no `MetadataIndex`"))?;
            let name = self.attribute(index, "fqn")?;
            let name = pickle
                .text(name)
                .ok_or_else(|| Error::damaged("the name of a tensor is no text"))?;
            let offset = match pickle.attribute(index, "offset") {
                None => None,
                Some(id) if matches!(pickle.get(id), crate::pickle::Value::None) => None,
                Some(id) => Some(self.extents(id)?),
            };
            let place = self.place(*value).map_err(|error| {
                error
                    .key(name)
                    .within(format_args!("`{}`", Printable(name)))
            })?;
            let before = places.insert((name, offset), place);
            if before.is_some() {
                return Err(Error::damaged(format!(
                    "`{}` has two places for one chunk",
                    Printable(name)
                )));
            }
        }
        Ok(places)
    }

    fn place(&mut self, id: Id) -> Result<Place> {
        let pickle = self.pickle;
        let info = pickle.call(
            id,
            "torch.distributed.checkpoint.filesystem",
            "_StorageInfo",
        );
        let info =
            info.ok_or_else(|| Error::damaged("the place of a chunk is no `_StorageInfo`"))?;
        let path = self.attribute(info, "relative_path")?;
        let path = pickle
            .text(path)
            .ok_or_else(|| Error::damaged("the path of a file is no text"))?;
        let number = |name: &str| -> Result<u64> {
            let int = pickle.int(self.attribute(info, name)?);
            let int =
                int.ok_or_else(|| Error::damaged(format!("the {name} of a chunk is no integer")))?;
            u64::try_from(int)
                .map_err(|_| Error::damaged(format!("the {name} of a chunk is {int}")))
        };
        let (offset, n_bytes) = (number("offset")?, number("length")?);
        let mut transforms = Vec::new();
        if let Some(id) = pickle.attribute(info, "transform_descriptors")
            && !matches!(pickle.get(id), crate::pickle::Value::None)
        {
            let listed = pickle
                .sequence(id)
                .ok_or_else(|| Error::damaged("the transforms of a chunk are no list"))?;
            for id in listed {
                let text = pickle
                    .text(*id)
                    .ok_or_else(|| Error::damaged("a transform that is no text"))?;
                transforms.push(text.to_owned());
            }
        }
        let n_files = self.files.len() as u32;
        let file = *self.by_path.entry(path).or_insert(n_files);
        if file == n_files {
            self.files.push(path.to_owned());
        }
        Ok(Place {
            file,
            offset,
            n_bytes,
            transforms,
        })
    }

    /// Megatron-Core before 0.14 stores some states of its optimizer in another shape and says here what it was.
    fn original_shapes(&self, root: &Record) -> Result<HashMap<String, Vec<u64>>> {
        let mut shapes = HashMap::new();
        let Some(entries) = self
            .pickle
            .attribute(root, "mcore_data")
            .and_then(|id| self.pickle.items(id))
        else {
            return Ok(shapes);
        };
        for (key, value) in entries {
            if let (Some(name), Some(shape)) = (
                self.pickle.text(*key),
                self.pickle
                    .item(*value, "nd_reformulated_orig_global_shape"),
            ) {
                shapes.insert(name.to_owned(), self.extents(shape)?);
            }
        }
        Ok(shapes)
    }

    fn attribute(&self, record: &Record, name: &str) -> Result<Id> {
        self.pickle
            .attribute(record, name)
            .ok_or_else(|| Error::damaged(format!("`{name}` is missing")))
    }

    fn extents(&self, id: Id) -> Result<Vec<u64>> {
        let ids = self
            .pickle
            .sequence(id)
            .ok_or_else(|| Error::damaged("a size or offset that is no tuple"))?;
        let extent = |id: &Id| self.pickle.int(*id).and_then(|int| u64::try_from(int).ok());
        ids.iter()
            .map(|id| extent(id).ok_or_else(|| Error::damaged("a size or offset that is no count")))
            .collect()
    }
}

/// The index of a folder. No data file is opened yet.
///
/// # Errors
/// A file's path leaves the folder; chunks of a tensor overlap.
pub fn index_of(dcp: &Dcp, folder: &Path, method: Method) -> Result<Index> {
    let mut index = Index::new();
    let paths: Vec<PathBuf> = dcp
        .files
        .iter()
        .map(|name| path_in(folder, name))
        .collect::<Result<_>>()?;
    let mut items: Vec<Vec<Item>> = dcp.files.iter().map(|_| Vec::new()).collect();
    let mut compressed = Vec::new();
    for (number, tensor) in dcp.tensors.iter().enumerate() {
        let Ok(dtype) = tensor.dtype else {
            continue;
        };
        for (n, chunk) in tensor.chunks.iter().enumerate() {
            let item = Item {
                name: item_name(n, &tensor.name),
                dtype,
                shape: chunk.shape.clone(),
                place: chunk.place.clone(),
            };
            if chunk.place.transforms.is_empty() {
                items[chunk.place.file as usize].push(item);
            } else if is_zstd(&chunk.place.transforms) {
                compressed.push(((number, n), item));
            } else {
                let message = format!(
                    "`{}` is transformed by {}, which is not known",
                    Printable(&tensor.name),
                    Printable(&chunk.place.transforms.join(", "))
                );
                return Err(Error::new(Kind::Unsupported, message).key(&tensor.name));
            }
        }
    }
    for (path, items) in paths.iter().zip(items) {
        index.add_local(path.clone(), false, method, reader_of(items));
    }
    // The items of a compressed file are unpacked one by one: to the index each one is a file of its own.
    let mut unpacked: HashMap<(usize, usize), u32> = HashMap::new();
    for (at, item) in compressed {
        let path = paths[item.place.file as usize].clone();
        let (opened, place, most) = (path.clone(), item.place.clone(), item.max_bytes());
        let open = move || {
            let source = Source::open(&opened, false, method)?;
            decompressed(source, place.offset, place.n_bytes, most)
        };
        let format = Format::Listed(Arc::new(move |source: &Source| {
            let place = Place {
                file: 0,
                offset: 0,
                n_bytes: source.n_bytes(),
                transforms: Vec::new(),
            };
            listed(
                source,
                &[Item {
                    place,
                    ..item.clone()
                }],
            )
        }));
        unpacked.insert(at, index.add_source(path, format, open));
    }
    for (number, tensor) in dcp.tensors.iter().enumerate() {
        let Ok(dtype) = tensor.dtype else {
            continue;
        };
        let original = dcp.original_shapes.get(&tensor.name);
        let stored = tensor.chunks.iter().enumerate().map(|(n, chunk)| {
            let tiles = match original {
                Some(shape) => flattened_tiles(shape, &tensor.shape, chunk)
                    .map_err(|error| error.key(&tensor.name))?,
                None => vec![Tile {
                    global: Region::new(chunk.offset.clone(), chunk.shape.clone())?,
                    local_offset: 0,
                    local_strides: row_major_strides(&chunk.shape),
                }],
            };
            let file = unpacked
                .get(&(number, n))
                .copied()
                .unwrap_or(chunk.place.file);
            let stored = StoredTensor {
                file,
                name: item_name(n, &tensor.name),
                shape: chunk.shape.clone(),
            };
            Ok((stored, tiles))
        });
        let stored = stored.collect::<Result<Vec<_>>>()?;
        index.add_tiles(
            &tensor.name,
            dtype,
            original.unwrap_or(&tensor.shape).clone(),
            BTreeMap::new(),
            stored,
            false,
        )?;
    }
    Ok(index)
}

/// The tiles of a chunk of a tensor of Megatron-Core that is stored in another form.
///
/// A tensor `[X, Y]` that is cut into blocks `[x, y]` is stored as `[X / x, Y / y, x * y]`: each block is flattened, and
/// the ranks that share it store ranges of it. A range of a flattened block is a few boxes of the tensor.
///
/// # Errors
/// The two shapes do not belong together.
fn flattened_tiles(shape: &[u64], stored: &[u64], chunk: &Chunk) -> Result<Vec<Tile>> {
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

/// A tensor that one item of a data file holds.
#[derive(Debug, Clone)]
struct Item {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    place: Place,
}

impl Item {
    /// Bytes that the item can have: its data, and a generous frame.
    fn max_bytes(&self) -> u64 {
        self.dtype
            .n_bytes(&self.shape)
            .unwrap_or(0)
            .saturating_add(1 << 20)
    }
}

fn item_name(number: usize, tensor: &str) -> String {
    format!("{number}@{tensor}")
}

fn reader_of(items: Vec<Item>) -> Format {
    Format::Listed(Arc::new(move |source: &Source| listed(source, &items)))
}

/// Opens the items of a data file.
fn listed(source: &Source, items: &[Item]) -> Result<Listed> {
    let mut tensors = Vec::with_capacity(items.len());
    let mut ranges = Vec::with_capacity(items.len());
    for Item {
        name,
        dtype,
        shape,
        place,
    } in items
    {
        let key = name.split_once('@').map_or(name.as_str(), |(_, key)| key);
        let (storage, tensor) = item_tensor(source, place, *dtype, shape)
            .map_err(|error| error.key(key).within(format_args!("`{}`", Printable(key))))?;
        let storages = [storage];
        ranges.extend(crc_ranges(&storages));
        tensors.push(
            Tensor {
                storage: 0,
                ..tensor
            }
            .listed(name.clone(), &storages),
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
pub fn item_tensor(
    source: &Source,
    place: &Place,
    dtype: Dtype,
    shape: &[u64],
) -> Result<(Storage, Tensor)> {
    let file = TorchFile::read(Window::new(source, place.offset, place.n_bytes)?)?;
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
