//! Decodes a `metadata.json`: the partition of each tensor, and the files that hold its shards.
//!
//! The file lists every shard of every rank and can have hundreds of MB. It is streamed into compact tables: the names
//! of files and the layouts are stored once, and one holder of one shard takes 16 bytes.
//!
//! The content is validated. Fields can have any order, nothing may occur twice, and redundant values must agree: the
//! fragmentations of a tensor with its layout, the shape of each shard with the fragmentations. Every shard of every
//! tensor must be listed and held by a file. Unknown fields are skipped.
//!
//! This module opens no file and does not check that the listed files exist.

mod alike;
mod json;
mod open;
mod records;
mod storage_key;
mod table;
pub mod write;

pub use open::{open, open_table};
pub use storage_key::{parse_storage_key, storage_key};
pub use table::{Holders, MetadataTable, decode_files, decode_table, index_of_table};

use json::{Map, Members, Object, Record, Records, Skip};
use records::{ChunkRecord, HolderRecord, LayoutRecord, TensorRecord};
use reshard_core::dtype::{Dtype, n_elements};
use reshard_core::error::{Error, Kind, Printable, Result};
use reshard_core::header::{NUMBER_END, check_name};
use reshard_core::index::Index;
use reshard_core::source::Method;
use serde::de::{DeserializeSeed, MapAccess};
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// Most shards of one tensor.
pub const MAX_CELLS: u64 = 1 << 31;
/// Most ranks of one layout.
pub const MAX_RANKS: usize = reshard_core::mesh::MAX_POINTS as usize;
/// Longest spelling of a dtype.
const MAX_DTYPE_BYTES: usize = 64;
/// Longest name of a file, as of most file systems.
const MAX_FILE_NAME_BYTES: usize = 255;

/// The content of a `metadata.json`.
///
/// ```
/// use reshard_formats::metadata::decode;
///
/// let metadata = decode(br#"{
///     "state_dict_metadata": {"w": {
///         "properties": {"dtype": "Float32"}, "global_shape": [4, 2], "axis_fragmentations": [2, 1],
///         "layout": {"device_matrix": [2], "tensor_map": [0, -1], "interleaved_parallel": false,
///                    "alias_name": ["tp"], "rank_list": [0, 1]},
///         "chunk": [{"global_offset": [0], "local_shape": [2, 2]}, {"global_offset": [1], "local_shape": [2, 2]}]}},
///     "storage_data": {
///         "('w', (0,))": [{"file_name": "model-0000000-0000002.safetensors", "storage_rank": 0, "rank_group": [0]}],
///         "('w', (1,))": [{"file_name": "model-0000001-0000002.safetensors", "storage_rank": 1, "rank_group": [1]}]}
/// }"#)?;
/// let w = &metadata.tensors[0];
/// assert_eq!((&*w.name, w.cells.holders(1)), ("w", &[(1, 1)][..]));
/// assert_eq!(metadata.layouts[0].tensor_map, [vec![0], vec![]]);
/// # Ok::<(), reshard_core::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metadata {
    /// Names of the shard files in the order of their first mention.
    pub files: Vec<String>,
    /// The distinct layouts in the order of their first mention.
    pub layouts: Vec<DeviceLayout>,
    /// The tensors in the order of the file.
    pub tensors: Vec<MetadataTensor>,
}

/// The layout of a tensor on the devices, with the field names of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct DeviceLayout {
    /// Sizes of the mesh axes, outermost first.
    pub device_matrix: Vec<u64>,
    /// For each dim the axes that split it, outermost first, numbered from the innermost axis (0). Empty: not split.
    pub tensor_map: Vec<Vec<u64>>,
    /// Names of the mesh axes.
    pub alias_name: Vec<String>,
    /// The global rank at each mesh point, row-major.
    pub rank_list: Vec<u64>,
    /// Always false: interleaved layouts are not supported.
    pub interleaved_parallel: bool,
}

/// One tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MetadataTensor {
    /// Its key.
    pub name: Arc<str>,
    /// Its dtype in the spelling of the file.
    pub dtype: Arc<str>,
    /// Its global shape in elements.
    pub shape: Vec<u64>,
    /// Number of equal parts of each dim.
    pub fragmentations: Vec<u64>,
    /// Number of its layout; `None` if the layout is null and the tensor is not partitioned.
    pub layout: Option<u32>,
    /// The holders of each part; tensors that lie alike share them.
    pub cells: Arc<CellTable>,
}

/// The holders of each cell of the grid of a tensor, row-major over the fragmentations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CellTable {
    /// Start of the holders of each cell, and the end of the last.
    pub starts: Vec<u32>,
    /// `(file, storage rank)` of each holder, cell by cell; within a cell in the order of the files, each once.
    pub holders: Vec<(u32, u64)>,
}

impl DeviceLayout {
    /// Number of parts of each dim.
    fn n_parts(&self) -> Vec<u64> {
        // Axes are numbered from the innermost one.
        let size = |&axis: &u64| self.device_matrix[self.device_matrix.len() - 1 - axis as usize];
        self.tensor_map
            .iter()
            .map(|axes| axes.iter().map(size).product())
            .collect()
    }
}

impl CellTable {
    /// Number of cells.
    pub fn n_cells(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// `(file, storage rank)` of each holder of a cell.
    ///
    /// # Panics
    /// If `cell` is not below [`Self::n_cells`].
    pub fn holders(&self, cell: usize) -> &[(u32, u64)] {
        &self.holders[self.starts[cell] as usize..self.starts[cell + 1] as usize]
    }
}

/// The dtype of a spelling in the file; `None` for an unknown one, and for those that are no whole bytes.
pub fn dtype_of(spelling: &str) -> Option<Dtype> {
    Some(match spelling {
        "Bool" => Dtype::Bool,
        "UInt8" => Dtype::U8,
        "Int8" => Dtype::I8,
        "UInt16" => Dtype::U16,
        "Int16" => Dtype::I16,
        "UInt32" => Dtype::U32,
        "Int32" => Dtype::I32,
        "UInt64" => Dtype::U64,
        "Int64" => Dtype::I64,
        "Float16" => Dtype::F16,
        "BFloat16" => Dtype::Bf16,
        "Float32" => Dtype::F32,
        "Float64" => Dtype::F64,
        _ => return None,
    })
}

/// Builds the index of the tensors of a checkpoint. Its files are in `folder`.
pub fn index_of(metadata: &Metadata, folder: &Path, method: Method) -> Result<Index> {
    let mut known: HashMap<*const CellTable, Holders> = HashMap::new();
    let cells = metadata.tensors.iter().map(|tensor| {
        let of_tensor = known.entry(Arc::as_ptr(&tensor.cells));
        let made = of_tensor.or_insert_with(|| {
            let files = tensor.cells.holders.iter().map(|(file, _)| *file);
            (tensor.cells.starts.as_slice().into(), files.collect())
        });
        made.clone()
    });
    index_with(metadata, cells, folder, method)
}

/// The index of tensors whose cells are given: where the files of each begin, and the files.
fn index_with(
    metadata: &Metadata,
    cells: impl Iterator<Item = Holders>,
    folder: &Path,
    method: Method,
) -> Result<Index> {
    let mut index = Index::new();
    for name in &metadata.files {
        index.add_file(folder.join(name), false, method);
    }
    index.reserve(metadata.tensors.len());
    for (tensor, (starts, files)) in metadata.tensors.iter().zip(cells) {
        index.add_table(
            Arc::clone(&tensor.name),
            &tensor.shape,
            &tensor.fragmentations,
            starts,
            files,
        )?;
    }
    Ok(index)
}

/// Decodes the text of a `metadata.json`.
///
/// # Errors
/// [`Kind::Damaged`] if it violates the format or is inconsistent, [`Kind::Coverage`] if a part of a tensor is not
/// listed or no file holds it, [`Kind::Unsupported`] for an interleaved layout.
pub fn decode(text: &[u8]) -> Result<Metadata> {
    let text = std::str::from_utf8(text).map_err(|error| {
        Error::damaged(format!(
            "metadata is not UTF-8 from byte {} on",
            error.valid_up_to()
        ))
    })?;
    if let Some(metadata) = alike::decode(text) {
        return Ok(metadata);
    }
    decode_strictly(text)
}

fn decode_strictly(text: &str) -> Result<Metadata> {
    let mut decoder = Decoder::default();
    decoder.pass(text)?;
    if decoder.is_storage_early {
        // The holders precede the tensors in the file.
        decoder.pass(text)?;
    }
    decoder.finish()
}

/// The tables during decoding.
#[derive(Default)]
struct Decoder {
    metadata: Metadata,
    tensors: HashMap<Arc<str>, u32>,
    files: HashMap<String, u32>,
    layouts: HashMap<DeviceLayout, u32>,
    /// One per tensor.
    stored: Vec<Stored>,
    has_tensors: bool,
    has_storage: bool,
    is_storage_early: bool,
    /// The error of this module that stopped the pass. Errors of the JSON parser contain only text.
    error: Option<Error>,
}

/// The holders of a tensor that were decoded so far.
#[derive(Default)]
struct Stored {
    /// The cell of each storage key.
    cells: Vec<u32>,
    /// `(cell, file, storage rank)`
    holders: Vec<(u32, u32, u64)>,
}

impl Decoder {
    fn pass(&mut self, text: &str) -> Result<()> {
        let mut json = serde_json::Deserializer::from_str(text);
        let done = Object(self)
            .deserialize(&mut json)
            .and_then(|()| json.end());
        done.map_err(|error| {
            let own = self.error.take();
            own.unwrap_or_else(|| {
                Error::damaged(format!("metadata: {}", Printable(&error.to_string())))
            })
        })
    }

    /// Applies a parsed value. An error is stored with its context and stops the pass.
    fn settle<T, E: serde::de::Error>(
        &mut self,
        parsed: Result<T, E>,
        apply: impl FnOnce(&mut Self, T) -> Result<()>,
        context: impl FnOnce(Error) -> Error,
    ) -> Result<(), E> {
        let applied = match parsed {
            Ok(parsed) => apply(self, parsed),
            Err(error) => Err(Error::damaged(Printable(&error.to_string()).to_string())),
        };
        applied.map_err(|error| {
            self.error = Some(context(error));
            E::custom("stopped")
        })
    }

    fn add_tensor(&mut self, name: &str, record: TensorRecord<'_>) -> Result<()> {
        self.check_new(name)?;
        let missing = |field: &str| Error::damaged(format!("`{field}` is missing"));
        let dtype = record
            .properties
            .ok_or_else(|| missing("properties"))?
            .dtype;
        let dtype = dtype.ok_or_else(|| missing("properties.dtype"))?;
        if !(1..=MAX_DTYPE_BYTES).contains(&dtype.len()) {
            return Err(Error::damaged(format!(
                "`properties.dtype` has {} bytes, expected 1 to {MAX_DTYPE_BYTES}",
                dtype.len()
            )));
        }
        let shape = record.shape.ok_or_else(|| missing("global_shape"))?;
        let fragmentations = record
            .fragmentations
            .ok_or_else(|| missing("axis_fragmentations"))?;
        if !record.has_layout {
            return Err(missing("layout"));
        }
        let chunks = record.chunks.ok_or_else(|| missing("chunk"))?;

        let n_cells = check_fragmentations(&shape, &fragmentations)?;
        let layout = match record.layout {
            None if n_cells == 1 => None,
            None => {
                return Err(Error::damaged(format!(
                    "`layout` is null, which means not partitioned, but `axis_fragmentations` is {fragmentations:?}"
                )));
            }
            Some(record) => Some(self.add_layout(record, &fragmentations)?),
        };
        check_chunks(chunks, &shape, &fragmentations, n_cells)?;

        self.push(MetadataTensor {
            name: name.into(),
            dtype: dtype.into(),
            shape,
            fragmentations,
            layout,
            cells: Arc::default(),
        })
    }

    /// Adds a tensor that has everything but its name in common with one before.
    fn add_like(&mut self, name: &str, first: u32) -> Result<()> {
        self.check_new(name)?;
        let first = &self.metadata.tensors[first as usize];
        self.push(MetadataTensor {
            name: name.into(),
            ..first.clone()
        })
    }

    fn check_new(&self, name: &str) -> Result<()> {
        check_name(name)?;
        if self.tensors.contains_key(name) {
            return Err(Error::damaged("the tensor is listed twice"));
        }
        Ok(())
    }

    fn push(&mut self, tensor: MetadataTensor) -> Result<()> {
        let id = u32::try_from(self.stored.len())
            .map_err(|_| Error::damaged("there are more than 2^32 tensors"))?;
        self.tensors.insert(Arc::clone(&tensor.name), id);
        self.metadata.tensors.push(tensor);
        self.stored.push(Stored::default());
        Ok(())
    }

    fn add_layout(&mut self, record: LayoutRecord, fragmentations: &[u64]) -> Result<u32> {
        let layout = record.check()?;
        let n_parts = layout.n_parts();
        if n_parts != fragmentations {
            return Err(Error::damaged(format!(
                "`layout` splits the dims into {n_parts:?} parts, but `axis_fragmentations` is {fragmentations:?}"
            )));
        }
        if let Some(&id) = self.layouts.get(&layout) {
            return Ok(id);
        }
        let mut ranks = layout.rank_list.clone();
        ranks.sort_unstable();
        if let Some([rank, _]) = ranks.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::damaged(format!(
                "`layout.rank_list` has rank {rank} twice"
            )));
        }
        let id = self.metadata.layouts.len() as u32;
        self.metadata.layouts.push(layout.clone());
        self.layouts.insert(layout, id);
        Ok(id)
    }

    fn add_storage(&mut self, key: &str, holders: &[HolderRecord<'_>]) -> Result<()> {
        let (name, offset) = parse_storage_key(key)?;
        let Some(&id) = self.tensors.get(&*name) else {
            let problem = format!("`state_dict_metadata` has no tensor `{}`", Printable(&name));
            return Err(Error::damaged(problem).key(&name));
        };
        self.add_holders(id as usize, offset, holders)
            .map_err(|error| error.key(&name))
    }

    fn add_holders(&mut self, id: usize, offset: u64, holders: &[HolderRecord<'_>]) -> Result<()> {
        let MetadataTensor {
            shape,
            fragmentations,
            ..
        } = &self.metadata.tensors[id];
        let n_cells: u64 = fragmentations.iter().product();
        if offset >= n_cells {
            return Err(Error::damaged(format!(
                "`axis_fragmentations` {fragmentations:?} makes {n_cells} shards"
            )));
        }
        if holders.is_empty() {
            return Err(uncovered(shape, fragmentations, offset, "no file holds it"));
        }
        let cell = offset as u32;
        self.stored[id].cells.push(cell);
        for holder in holders {
            let missing = |field: &str| Error::damaged(format!("`{field}` is missing"));
            let name = holder.file.as_deref().ok_or_else(|| missing("file_name"))?;
            let rank = holder.rank.ok_or_else(|| missing("storage_rank"))?;
            let file = self.file(name)?;
            self.stored[id].holders.push((cell, file, rank));
        }
        Ok(())
    }

    /// Returns the number of a file, and adds the file if it is new.
    fn file(&mut self, name: &str) -> Result<u32> {
        if let Some(&id) = self.files.get(name) {
            return Ok(id);
        }
        check_file_name(name)?;
        let id = self.metadata.files.len() as u32;
        self.metadata.files.push(name.to_owned());
        self.files.insert(name.to_owned(), id);
        Ok(id)
    }

    /// Converts the collected values to tables. Every cell must have a holder.
    fn finish(mut self) -> Result<Metadata> {
        for (is_there, section) in [
            (self.has_tensors, "state_dict_metadata"),
            (self.has_storage, "storage_data"),
        ] {
            if !is_there {
                return Err(Error::damaged(format!("metadata has no `{section}`")));
            }
        }
        for (tensor, stored) in self.metadata.tensors.iter_mut().zip(self.stored) {
            let cells = stored.into_table(tensor);
            tensor.cells = Arc::new(cells.map_err(|error| error.key(&tensor.name))?);
        }
        Ok(self.metadata)
    }
}

impl Stored {
    fn into_table(self, tensor: &MetadataTensor) -> Result<CellTable> {
        let Self {
            mut cells,
            mut holders,
        } = self;
        cells.sort_unstable();
        if let Some(pair) = cells.windows(2).find(|pair| pair[0] == pair[1]) {
            let key = storage_key(&tensor.name, pair[0].into());
            return Err(Error::damaged(format!(
                "`storage_data` has `{}` twice",
                Printable(&key)
            )));
        }
        // The cells are distinct and inside the grid, so all cells are listed if their number is right.
        let n_cells: u64 = tensor.fragmentations.iter().product();
        if cells.len() as u64 != n_cells {
            let why = "`storage_data` lists no file for it";
            return Err(uncovered(
                &tensor.shape,
                &tensor.fragmentations,
                first_missing(&cells),
                why,
            )
            .within(format_args!("metadata of `{}`", Printable(&tensor.name))));
        }
        holders.sort_unstable();
        holders.dedup_by_key(|&mut (cell, file, _)| (cell, file));
        if u32::try_from(holders.len()).is_err() {
            return Err(Error::damaged(
                "the tensor's shards have more than 2^32 holders",
            ));
        }
        let mut starts = Vec::with_capacity(cells.len() + 1);
        for (i, &(cell, ..)) in holders.iter().enumerate() {
            if starts.len() <= cell as usize {
                starts.push(i as u32);
            }
        }
        starts.push(holders.len() as u32);
        Ok(CellTable {
            starts,
            holders: holders
                .into_iter()
                .map(|(_, file, rank)| (file, rank))
                .collect(),
        })
    }
}

impl<'de> Record<'de> for Decoder {
    const FIELDS: &'static [&'static str] = &["state_dict_metadata", "storage_data"];

    fn field<A: MapAccess<'de>>(&mut self, field: usize, map: &mut A) -> Result<(), A::Error> {
        match field {
            0 if self.has_tensors => map.next_value_seed(Skip::default()),
            0 => {
                self.has_tensors = true;
                map.next_value_seed(Map {
                    members: &mut Tensors(self),
                    expecting: "an object of tensors",
                })
            }
            _ if self.has_tensors => {
                self.has_storage = true;
                map.next_value_seed(Map {
                    members: &mut Storage(self),
                    expecting: "an object of storage keys",
                })
            }
            _ => {
                self.is_storage_early = true;
                map.next_value_seed(Skip::default())
            }
        }
    }
}

/// The members of `state_dict_metadata`.
struct Tensors<'d>(&'d mut Decoder);

impl<'de> Members<'de> for Tensors<'_> {
    fn member<A: MapAccess<'de>>(
        &mut self,
        name: Cow<'de, str>,
        map: &mut A,
    ) -> Result<(), A::Error> {
        let mut record = TensorRecord::default();
        let parsed = map.next_value_seed(Object(&mut record));
        self.0.settle(
            parsed,
            |decoder, ()| decoder.add_tensor(&name, record),
            |error| {
                error
                    .within(format_args!("metadata of `{}`", Printable(&name)))
                    .key(&name)
            },
        )
    }
}

/// The members of `storage_data`.
struct Storage<'d>(&'d mut Decoder);

impl<'de> Members<'de> for Storage<'_> {
    fn member<A: MapAccess<'de>>(
        &mut self,
        key: Cow<'de, str>,
        map: &mut A,
    ) -> Result<(), A::Error> {
        let parsed = map.next_value_seed(Records::default());
        self.0.settle(
            parsed,
            |decoder, holders| decoder.add_storage(&key, &holders),
            |error| error.within(format_args!("storage key `{}`", Printable(&key))),
        )
    }
}

/// Checks the grid of a tensor. Returns the number of cells.
fn check_fragmentations(shape: &[u64], fragmentations: &[u64]) -> Result<u64> {
    if shape.len() != fragmentations.len() {
        return Err(Error::damaged(format!(
            "`global_shape` {shape:?} has {} dims, but `axis_fragmentations` {fragmentations:?} has {}",
            shape.len(),
            fragmentations.len()
        )));
    }
    let nonzero: Vec<u64> = shape
        .iter()
        .copied()
        .filter(|&extent| extent != 0)
        .collect();
    if n_elements(&nonzero).is_none_or(|n| n >= NUMBER_END) {
        return Err(Error::damaged(format!(
            "the size of `global_shape` {shape:?} overflows"
        )));
    }
    let n_cells = fragmentations
        .iter()
        .try_fold(1_u64, |n, &parts| n.checked_mul(parts));
    let n_cells = n_cells
        .filter(|n| (1..=MAX_CELLS).contains(n))
        .ok_or_else(|| {
            Error::damaged(format!(
                "`axis_fragmentations` {fragmentations:?} makes an invalid number of shards; expected 1 to 2^31"
            ))
        })?;
    for (dim, (extent, parts)) in shape.iter().zip(fragmentations).enumerate() {
        if !extent.is_multiple_of(*parts) {
            return Err(Error::damaged(format!(
                "dim {dim} has {extent} elements, which is not divisible by {parts} shards; this format has no uneven shards"
            )));
        }
    }
    Ok(n_cells)
}

/// Checks that every cell of the grid is listed, with the shape of a shard.
fn check_chunks(
    chunks: Vec<ChunkRecord>,
    shape: &[u64],
    fragmentations: &[u64],
    n_cells: u64,
) -> Result<()> {
    let local = local_shape(shape, fragmentations);
    let mut cells = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        let missing = |field: &str| Error::damaged(format!("`{field}` of a chunk is missing"));
        let offset = chunk.offset.ok_or_else(|| missing("global_offset"))?;
        let found = chunk.local_shape.ok_or_else(|| missing("local_shape"))?;
        let &[cell] = offset.as_slice() else {
            return Err(Error::damaged(format!(
                "`global_offset` {offset:?} of a chunk must be one number, that of the shard"
            )));
        };
        if cell >= n_cells {
            return Err(Error::damaged(format!(
                "`global_offset` {offset:?} of a chunk, but `axis_fragmentations` {fragmentations:?} makes {n_cells} shards"
            )));
        }
        if found != local {
            return Err(Error::damaged(format!(
                "`local_shape` of chunk {cell} is {found:?}, but `global_shape` {shape:?} in {fragmentations:?} parts \
                 gives {local:?}; this format has no uneven shards"
            )));
        }
        cells.push(cell as u32);
    }
    cells.sort_unstable();
    // MindSpore Transformers ignores repeated chunks as well.
    cells.dedup();
    if cells.len() as u64 == n_cells {
        return Ok(());
    }
    Err(uncovered(
        shape,
        fragmentations,
        first_missing(&cells),
        "`chunk` does not list it",
    ))
}

fn local_shape(shape: &[u64], fragmentations: &[u64]) -> Vec<u64> {
    shape
        .iter()
        .zip(fragmentations)
        .map(|(extent, parts)| extent / parts)
        .collect()
}

/// The smallest number that is missing from ascending, distinct numbers.
fn first_missing(cells: &[u32]) -> u64 {
    cells
        .iter()
        .zip(0..)
        .find(|&(&cell, i)| u64::from(cell) != i)
        .map_or(cells.len() as u64, |(_, i)| i)
}

fn uncovered(shape: &[u64], fragmentations: &[u64], cell: u64, why: &str) -> Error {
    let local = local_shape(shape, fragmentations);
    let mut rest = cell;
    let mut offset = vec![0; shape.len()];
    for dim in (0..shape.len()).rev() {
        offset[dim] = rest % fragmentations[dim] * local[dim];
        rest /= fragmentations[dim];
    }
    let tuple = |numbers: &[u64]| {
        numbers
            .iter()
            .map(u64::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let (offset, local) = (tuple(&offset), tuple(&local));
    Error::new(
        Kind::Coverage,
        format!("stored shards leave offset ({offset}) shape ({local}) uncovered: {why}"),
    )
}

/// Checks that a name is that of a shard file in the folder of the `metadata.json`.
fn check_file_name(name: &str) -> Result<()> {
    let mut kind = Kind::Damaged;
    let problem = if name.is_empty() || name == "." || name == ".." {
        "is not a file name".to_owned()
    } else if name.contains(['/', '\\']) {
        "names another folder".to_owned()
    } else if name.chars().any(char::is_control) {
        "contains a control character".to_owned()
    } else if name.len() > MAX_FILE_NAME_BYTES {
        kind = Kind::Unsupported;
        format!("has {} bytes, more than {MAX_FILE_NAME_BYTES}", name.len())
    } else if ![".safetensors", ".safetensor"]
        .iter()
        .any(|suffix| name.ends_with(suffix))
    {
        "does not end in .safetensors".to_owned()
    } else {
        return Ok(());
    };
    let message = format!("`file_name` `{}` {problem}", Printable(name));
    Err(Error::new(kind, message))
}
