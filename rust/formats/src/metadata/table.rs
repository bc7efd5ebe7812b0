//! The binary table of a `metadata.json`: the same content without the text, a hundred times smaller for many ranks.
//!
//! It is derived from the file and holds the digest of it. Files, layouts and the tables of holders are stored once;
//! tensors refer to them by number. Numbers are little-endian and have 4 or 8 bytes, texts and lists begin with their
//! length in 4 bytes.
//!
//! ```text
//! "RSMETA01"  digest (text)
//! files:      texts
//! layouts:    device_matrix, tensor_map (list of lists), alias_name (texts), rank_list
//! holders:    starts (4 bytes each), files (4 bytes each): the files of cell i are files[starts[i]..starts[i + 1]]
//! tensors:    name, dtype, shape, fragmentations, layout + 1 or 0 (4 bytes), number of its holders (4 bytes)
//! ```
//!
//! The ranks that stored a shard are left out. A table is checked like the text: everything that [`super::decode`]
//! requires of tensors, layouts, file names and holders is required here.

use super::records::LayoutRecord;
use super::{
    DeviceLayout, MAX_DTYPE_BYTES, MAX_RANKS, Metadata, MetadataTensor, check_file_name,
    check_fragmentations,
};
use reshard_core::error::{Error, Printable, Result};
use reshard_core::header::{MAX_RANK, NUMBER_END, check_name};
use reshard_core::index::Index;
use reshard_core::source::Method;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

pub(super) const MAGIC: &[u8; 8] = b"RSMETA01";
/// Most holders of all tensors. The text of 4 GiB has fewer; tensors that share a list could otherwise have any number.
const MAX_HOLDERS: u64 = 1 << 27;

/// The content of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataTable {
    /// Digest of the `metadata.json` from which it was made, as its maker computed it.
    pub digest: String,
    /// The files, the layouts and the tensors; the tensors are without cells. [`index_of_table`] refuses equal names.
    pub metadata: Metadata,
    /// The distinct tables of holders: starts and files.
    pub holders: Vec<Holders>,
    /// For each tensor the number of its holders.
    pub holders_of: Vec<u32>,
}

/// Start of the holders of each cell, and the end of the last; the files that hold the cells.
pub type Holders = (Arc<[u32]>, Arc<[u32]>);

/// Decodes and checks a table. Memory is bounded by a small multiple of its size.
///
/// # Errors
/// As [`super::decode`], and [`reshard_core::Kind::Damaged`] if the table is truncated or longer than its content.
pub fn decode_table(data: &[u8]) -> Result<MetadataTable> {
    let mut from = Reader(data);
    let (digest, files) = from.digest_and_files()?;
    let mut seen = HashSet::with_capacity(files.len());
    for name in &files {
        if !seen.insert(name) {
            return Err(Error::damaged(format!(
                "the file `{}` is listed twice",
                Printable(name)
            )));
        }
    }
    let n_layouts = from.len(16)?;
    let layouts = (0..n_layouts)
        .map(|_| from.layout())
        .collect::<Result<Vec<_>>>()?;
    let n_holders = from.len(8)?;
    let mut holders = Vec::with_capacity(n_holders);
    for _ in 0..n_holders {
        let (starts, of_cells) = (from.shorts()?, from.shorts()?);
        check_holders(&starts, &of_cells, files.len())?;
        holders.push((starts, of_cells));
    }
    let n_tensors = from.len(24)?;
    let mut metadata = Metadata {
        files,
        layouts,
        tensors: Vec::with_capacity(n_tensors),
    };
    let mut holders_of = Vec::with_capacity(n_tensors);
    let mut n_held: u64 = 0;
    for _ in 0..n_tensors {
        let name = from.text()?;
        let last = metadata.tensors.last().map(|tensor| &tensor.dtype);
        let tensor = from.tensor(name, last, &metadata.layouts, &holders);
        let (tensor, of_tensor) = tensor.map_err(|error| {
            error
                .within(format_args!("table of `{}`", Printable(name)))
                .key(name)
        })?;
        n_held += holders[of_tensor as usize].1.len() as u64;
        if n_held > MAX_HOLDERS {
            return Err(Error::damaged(format!(
                "the tensors have more than {MAX_HOLDERS} holders"
            )));
        }
        metadata.tensors.push(tensor);
        holders_of.push(of_tensor);
    }
    if !from.0.is_empty() {
        return Err(Error::damaged(format!(
            "{} bytes follow the table",
            from.0.len()
        )));
    }
    Ok(MetadataTable {
        digest,
        metadata,
        holders,
        holders_of,
    })
}

/// The names of the files of a table. Nothing behind them is decoded.
///
/// # Errors
/// They are truncated, or one is not the name of a file.
pub fn decode_files(data: &[u8]) -> Result<Vec<String>> {
    let (_, files) = Reader(data).digest_and_files()?;
    Ok(files)
}

/// Builds the index of the tensors of a checkpoint, as [`super::index_of`] does. Its files are in `folder`.
///
/// # Errors
/// [`reshard_core::Kind::Damaged`] if a tensor is listed twice.
pub fn index_of_table(table: &MetadataTable, folder: &Path, method: Method) -> Result<Index> {
    let cells = table.holders_of.iter();
    let cells = cells.map(|&number| table.holders[number as usize].clone());
    super::index_with(&table.metadata, cells, folder, method)
}

/// Checks that every cell has a holder, each file once and in ascending order.
fn check_holders(starts: &[u32], files: &[u32], n_files: usize) -> Result<()> {
    let is_table = starts.first() == Some(&0)
        && starts
            .last()
            .is_some_and(|&end| end as usize == files.len())
        && starts.windows(2).all(|pair| pair[0] < pair[1]);
    let is_known = || files.iter().all(|&file| (file as usize) < n_files);
    let is_ascending = || {
        starts.windows(2).all(|cell| {
            let of_cell = &files[cell[0] as usize..cell[1] as usize];
            of_cell.windows(2).all(|pair| pair[0] < pair[1])
        })
    };
    if is_table && is_known() && is_ascending() {
        return Ok(());
    }
    Err(Error::damaged(
        "a list of holders is not in order, lacks a cell, or names a file that is not listed",
    ))
}

pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn short(&mut self, number: u32) {
        self.0.extend(number.to_le_bytes());
    }

    pub(super) fn len(&mut self, len: usize) -> Result<()> {
        let len = u32::try_from(len)
            .map_err(|_| Error::damaged("a list of metadata has more than 2^32 entries"))?;
        self.short(len);
        Ok(())
    }

    pub(super) fn text(&mut self, text: &str) -> Result<()> {
        self.len(text.len())?;
        self.0.extend(text.as_bytes());
        Ok(())
    }

    pub(super) fn texts<'a>(
        &mut self,
        mut texts: impl ExactSizeIterator<Item = &'a String>,
    ) -> Result<()> {
        self.len(texts.len())?;
        texts.try_for_each(|text| self.text(text))
    }

    pub(super) fn longs(&mut self, numbers: &[u64]) -> Result<()> {
        self.len(numbers.len())?;
        self.0.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
        Ok(())
    }

    pub(super) fn shorts(&mut self, numbers: impl ExactSizeIterator<Item = u32>) -> Result<()> {
        self.len(numbers.len())?;
        self.0.extend(numbers.flat_map(u32::to_le_bytes));
        Ok(())
    }
}

/// The bytes that are left.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n_bytes: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.0.split_at_checked(n_bytes) else {
            return Err(Error::damaged("the table of metadata is truncated"));
        };
        self.0 = rest;
        Ok(taken)
    }

    fn digest_and_files(&mut self) -> Result<(String, Vec<String>)> {
        if self.take(MAGIC.len())? != MAGIC {
            return Err(Error::damaged("it does not begin as a table of metadata"));
        }
        let digest = self.text()?.to_owned();
        let files = self.texts()?;
        files.iter().try_for_each(|name| check_file_name(name))?;
        Ok((digest, files))
    }

    fn short(&mut self) -> Result<u32> {
        let bytes = self.take(4)?.try_into().expect("4 bytes");
        Ok(u32::from_le_bytes(bytes))
    }

    /// The length of a list whose entries have at least `min_bytes` bytes each: it is not more than what is left.
    fn len(&mut self, min_bytes: usize) -> Result<usize> {
        let len = self.short()? as usize;
        if len.checked_mul(min_bytes).is_none_or(|n| n > self.0.len()) {
            return Err(Error::damaged("the table of metadata is truncated"));
        }
        Ok(len)
    }

    fn text(&mut self) -> Result<&'a str> {
        let len = self.len(1)?;
        std::str::from_utf8(self.take(len)?)
            .map_err(|_| Error::damaged("a text in the table of metadata is not UTF-8"))
    }

    fn texts(&mut self) -> Result<Vec<String>> {
        let len = self.len(4)?;
        (0..len).map(|_| self.text().map(str::to_owned)).collect()
    }

    fn longs(&mut self, most: usize) -> Result<Vec<u64>> {
        let len = self.len(8)?;
        let numbers: Vec<u64> = self
            .take(8 * len)?
            .as_chunks::<8>()
            .0
            .iter()
            .map(|bytes| u64::from_le_bytes(*bytes))
            .collect();
        if len > most || numbers.iter().any(|&number| number >= NUMBER_END) {
            return Err(Error::damaged(
                "a list of numbers in the table of metadata is too long, or a number is too large",
            ));
        }
        Ok(numbers)
    }

    fn shorts(&mut self) -> Result<Arc<[u32]>> {
        let len = self.len(4)?;
        let bytes = self.take(4 * len)?.as_chunks::<4>().0;
        Ok(bytes
            .iter()
            .map(|bytes| u32::from_le_bytes(*bytes))
            .collect())
    }

    fn layout(&mut self) -> Result<DeviceLayout> {
        let device_matrix = self.longs(MAX_RANK)?;
        let n_dims = self.len(4)?;
        if n_dims > MAX_RANK {
            return Err(Error::damaged("a layout in the table has too many dims"));
        }
        let tensor_map = (0..n_dims).map(|_| self.longs(MAX_RANK));
        let tensor_map = tensor_map.collect::<Result<_>>()?;
        let alias_name = self.texts()?;
        let record = LayoutRecord {
            device_matrix: Some(device_matrix),
            tensor_map: Some(tensor_map),
            is_interleaved: Some(false),
            alias_name: Some(alias_name),
            rank_list: Some(self.longs(MAX_RANKS)?),
        };
        let layout = record.check()?;
        let mut ranks = layout.rank_list.clone();
        ranks.sort_unstable();
        if ranks.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(Error::damaged("a layout in the table has a rank twice"));
        }
        Ok(layout)
    }

    /// The rest of a tensor, and the number of its holders.
    fn tensor(
        &mut self,
        name: &str,
        last_dtype: Option<&Arc<str>>,
        layouts: &[DeviceLayout],
        holders: &[Holders],
    ) -> Result<(MetadataTensor, u32)> {
        check_name(name)?;
        let dtype = self.text()?;
        if !(1..=MAX_DTYPE_BYTES).contains(&dtype.len()) {
            return Err(Error::damaged("the dtype is empty or too long"));
        }
        let (shape, fragmentations) = (self.longs(MAX_RANK)?, self.longs(MAX_RANK)?);
        let n_cells = check_fragmentations(&shape, &fragmentations)?;
        let layout = self.short()?.checked_sub(1);
        let is_fitting = match layout {
            None => n_cells == 1,
            Some(number) => layouts
                .get(number as usize)
                .is_some_and(|layout| layout.n_parts() == fragmentations),
        };
        if !is_fitting {
            return Err(Error::damaged(
                "its layout does not exist or has other fragmentations",
            ));
        }
        let number = self.short()?;
        let has_all = holders
            .get(number as usize)
            .is_some_and(|(starts, _)| starts.len() as u64 == n_cells + 1);
        if !has_all {
            return Err(Error::damaged(
                "its holders do not exist or are of another number of shards",
            ));
        }
        let tensor = MetadataTensor {
            name: name.into(),
            // Most tensors have that of the one before.
            dtype: match last_dtype {
                Some(last) if **last == *dtype => Arc::clone(last),
                _ => dtype.into(),
            },
            shape,
            fragmentations,
            layout,
            cells: Arc::default(),
        };
        Ok((tensor, number))
    }
}
