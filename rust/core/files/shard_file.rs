//! One shard file: its checked table of contents and its bytes.
//!
//! A safetensors file has its table at the start; the tables of other formats are made by readers outside this crate.
//! Other modules do not distinguish the formats: a file has tensors with a name, a dtype, a shape and a byte range.

use crate::control::Control;
use crate::error::{Error, Result};
use crate::files::checksum::{Checksums, crc32c};
use crate::files::header::{Entry, Header, MAX_HEADER_BYTES};
use crate::files::listed::Listed;
use crate::files::local_array::LocalArray;
use crate::files::source::Source;
use crate::geometry::dtype::Dtype;
use std::fmt;
use std::sync::Arc;

/// The format of a shard file.
#[derive(Clone)]
pub enum Format {
    /// A safetensors file, with a header.
    Safetensors,
    /// A file of a format that is read outside this crate.
    Listed(ReadTable),
}

/// Reads the table of a file.
pub type ReadTable = Arc<dyn Fn(&Source) -> Result<Listed> + Send + Sync>;

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Safetensors => "Safetensors",
            Self::Listed(_) => "Listed",
        })
    }
}

/// The table of contents of a shard file.
#[derive(Debug)]
pub enum Table {
    /// The header of a safetensors file.
    Header(Header),
    /// Of a file of another format.
    Listed(Listed),
}

/// An opened shard file whose table was checked.
#[derive(Debug)]
pub struct ShardFile {
    source: Source,
    table: Arc<Table>,
    checksums: Option<Arc<Checksums>>,
}

impl Table {
    /// Number of stored tensors.
    pub fn len(&self) -> usize {
        match self {
            Self::Header(header) => header.len(),
            Self::Listed(listed) => listed.len(),
        }
    }

    /// Whether there is no stored tensor.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stored tensor `i` in the order of the data.
    ///
    /// # Panics
    /// If `i` is not below [`Self::len`].
    pub fn entry(&self, i: usize) -> Entry<'_> {
        match self {
            Self::Header(header) => header.entry(i),
            Self::Listed(listed) => listed.entry(i),
        }
    }

    /// dtype of stored tensor `i`. As of [`Self::entry`], without a list of extents.
    pub(crate) fn dtype(&self, i: usize) -> Dtype {
        match self {
            Self::Header(header) => header.dtype(i),
            Self::Listed(listed) => listed.kind(i).0,
        }
    }

    /// Whether stored tensor `i` has this shape.
    pub(crate) fn has_shape(&self, i: usize, shape: &[u64]) -> bool {
        match self {
            Self::Header(header) => header.has_shape(i, shape),
            Self::Listed(listed) => listed.kind(i).1 == shape,
        }
    }

    /// The number of the stored tensor with this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        match self {
            Self::Header(header) => header.find(name),
            Self::Listed(listed) => listed.find(name),
        }
    }

    /// Byte of the file from which the bytes of the entries are counted.
    pub fn data_start(&self) -> u64 {
        match self {
            Self::Header(header) => header.data_start(),
            Self::Listed(_) => 0,
        }
    }

    /// As [`Self::find`]; tensor `near` is tried first.
    pub(crate) fn find_near(&self, name: &str, near: usize) -> Option<usize> {
        match self {
            Self::Header(header) => header.find_near(name, near),
            Self::Listed(listed) => listed.find_near(name, near),
        }
    }

    /// Keys and values of `__metadata__`, sorted by key; `None` if the file has none.
    pub fn metadata(&self) -> Option<impl ExactSizeIterator<Item = (&str, &str)>> {
        match self {
            Self::Header(header) => header.metadata(),
            Self::Listed(_) => None,
        }
    }

    /// Names of values that are text instead of tensors.
    pub fn strings(&self) -> &[String] {
        match self {
            Self::Header(_) => &[],
            Self::Listed(listed) => listed.texts(),
        }
    }

    /// The tensors, each joined from its parts, in the order of the data.
    pub fn arrays(&self) -> Vec<LocalArray> {
        match self {
            Self::Header(header) => (0..header.len())
                .map(|i| LocalArray::whole(&header.entry(i)))
                .collect(),
            Self::Listed(listed) => listed.arrays(),
        }
    }

    /// Whether a tensor is stored in several parts.
    pub(crate) fn has_splits(&self) -> bool {
        matches!(self, Self::Listed(listed) if listed.has_splits())
    }

    /// The tensor with a name, if it is stored in several parts.
    pub fn split(&self, name: &str) -> Option<LocalArray> {
        match self {
            Self::Header(_) => None,
            Self::Listed(listed) => listed.split(name),
        }
    }

    /// The strides of a stored tensor, unless its elements follow each other in row-major order.
    pub fn strides(&self, name: &str) -> Option<&[u64]> {
        match self {
            Self::Header(_) => None,
            Self::Listed(listed) => listed.strides(listed.find(name)?),
        }
    }
}

impl ShardFile {
    /// Reads and checks the table of a file. With `checksums`, also verifies its size and its header.
    pub fn open(
        source: Source,
        format: &Format,
        checksums: Option<Arc<Checksums>>,
    ) -> Result<Self> {
        match format {
            Format::Safetensors => {
                let header = read_header(&source, checksums.as_deref())?;
                Ok(Self::of(source, Table::Header(header), checksums))
            }
            Format::Listed(read) => Ok(Self::read(source, |source| Ok((read(source)?, ())))?.0),
        }
    }

    /// Opens a file with what makes its table and something else.
    pub(crate) fn read<T>(
        source: Source,
        read: impl FnOnce(&Source) -> Result<(Listed, T)>,
    ) -> Result<(Self, T)> {
        let (table, other) = read(&source)
            .map_err(|error| error.within(source.path().display()).path(source.path()))?;
        Ok((Self::of(source, Table::Listed(table), None), other))
    }

    fn of(source: Source, table: Table, checksums: Option<Arc<Checksums>>) -> Self {
        Self {
            source,
            table: Arc::new(table),
            checksums,
        }
    }

    /// The checksums of its chunks, if they are known.
    pub fn checksums(&self) -> Option<&Arc<Checksums>> {
        self.checksums.as_ref()
    }

    /// The table of contents.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// The bytes.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// dtype, shape and first byte of a stored tensor in the file.
    pub fn tensor(&self, name: &str) -> Option<(Dtype, Vec<u64>, u64)> {
        let entry = self.table.entry(self.table.find(name)?);
        Some((
            entry.dtype,
            entry.shape,
            self.table.data_start() + entry.start,
        ))
    }

    /// Whether the file itself has checksums of its bytes.
    pub fn has_crc(&self) -> bool {
        match &*self.table {
            Table::Header(_) => false,
            Table::Listed(listed) => listed.has_crc(),
        }
    }

    /// Compares the content with the checksums in the file, as far as it has them. This is done once per opened file.
    ///
    /// # Errors
    /// The content differs, or cannot be read.
    pub fn verify(&self, control: &Control) -> Result<()> {
        match &*self.table {
            Table::Listed(listed) => listed.verify(&self.source, control),
            Table::Header(_) => Ok(()),
        }
    }

    /// The same for the content that a plan reads: the first byte of each copy. A checksum of the whole file is compared
    /// whole.
    ///
    /// # Errors
    /// The content differs, or cannot be read.
    pub fn verify_at(&self, positions: impl Iterator<Item = u64>, control: &Control) -> Result<()> {
        match &*self.table {
            Table::Listed(listed) => listed.verify_at(&self.source, positions, control),
            Table::Header(_) => Ok(()),
        }
    }
}

/// Bytes of a header that are read at once to be compared with its checksum.
const PIECE_BYTES: u64 = 256 << 10;

/// Compares the size of a file, and the bytes before its data with their checksum. Nothing is parsed.
///
/// # Errors
/// One of them differs, or the file cannot be read.
pub(crate) fn verify_header(source: &Source, checksums: &Checksums) -> Result<()> {
    check_size(source, checksums)?;
    let mut piece = Vec::new();
    let (mut at, mut found) = (0, 0);
    while at < checksums.header_bytes() {
        let n = (checksums.header_bytes() - at).min(PIECE_BYTES);
        piece.resize(n as usize, 0);
        source.read_at(at, &mut piece)?;
        found = crc32c(found, &piece);
        at += n;
    }
    if found == checksums.header_checksum() {
        Ok(())
    } else {
        Err(header_differs(source))
    }
}

/// Bytes of the data of a safetensors file, from the length of its header alone; `None` if the file is shorter.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn data_bytes(source: &Source) -> Result<Option<u64>> {
    let mut length = [0; 8];
    if source.n_bytes() < 8 {
        return Ok(None);
    }
    source.read_at(0, &mut length)?;
    Ok((source.n_bytes() - 8).checked_sub(u64::from_le_bytes(length)))
}

/// Whether the header of a safetensors file holds a text, which is searched as it is spelt.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn header_has(source: &Source, text: &[u8]) -> Result<bool> {
    let Some(n_data) = data_bytes(source)? else {
        return Ok(false);
    };
    let end = (source.n_bytes() - n_data).min(8 + MAX_HEADER_BYTES);
    let overlap = text.len().saturating_sub(1) as u64;
    let (mut at, mut piece) = (8, Vec::new());
    while at < end {
        // Pieces overlap, so that one of them holds the whole text.
        let n = (end - at).min(PIECE_BYTES + overlap);
        piece.resize(n as usize, 0);
        source.read_at(at, &mut piece)?;
        // Comparing a number first is several times faster than comparing slices.
        let start = text.first_chunk::<8>();
        if piece
            .windows(text.len())
            .any(|window| start.is_none_or(|start| window.starts_with(start)) && window == text)
        {
            return Ok(true);
        }
        at += PIECE_BYTES.min(n);
    }
    Ok(false)
}

fn check_size(source: &Source, checksums: &Checksums) -> Result<()> {
    if source.n_bytes() == checksums.n_bytes() {
        return Ok(());
    }
    let path = source.path();
    let message = format!(
        "{} has {} bytes, but {} were written",
        path.display(),
        source.n_bytes(),
        checksums.n_bytes()
    );
    Err(Error::damaged(message).path(path))
}

fn header_differs(source: &Source) -> Error {
    let path = source.path();
    let message = format!(
        "{}: the header differs from the one that was written",
        path.display()
    );
    Error::damaged(message).path(path)
}

/// A safetensors file whose header was read and parsed, but not compared with a checksum.
#[derive(Debug)]
pub struct ReadHeader {
    source: Source,
    header: Header,
}

impl ReadHeader {
    /// Reads and checks the header of a file.
    ///
    /// # Errors
    /// As [`Header::read`].
    pub fn new(source: Source) -> Result<Self> {
        let header = Header::read(&source)?;
        Ok(Self { source, header })
    }

    /// The opened file. As [`ShardFile::open`], which reads the header itself.
    pub(crate) fn open(self, checksums: Option<Arc<Checksums>>) -> Result<ShardFile> {
        if let Some(checksums) = checksums.as_deref() {
            check_size(&self.source, checksums)?;
        }
        let header = check_header(&self.source, Ok(self.header), checksums.as_deref())?;
        Ok(ShardFile::of(self.source, Table::Header(header), checksums))
    }
}

fn read_header(source: &Source, checksums: Option<&Checksums>) -> Result<Header> {
    if let Some(checksums) = checksums {
        check_size(source, checksums)?;
    }
    check_header(source, Header::read(source), checksums)
}

/// Compares what was read with the expected checksum of the header.
fn check_header(
    source: &Source,
    header: Result<Header>,
    checksums: Option<&Checksums>,
) -> Result<Header> {
    let differs = || header_differs(source);
    if let Some(checksums) = checksums {
        // A wrong checksum is reported before any other fault of the header.
        match &header {
            Ok(header) if header.checksum() == checksums.header_checksum() => {}
            Err(error) if error.kind() == crate::Kind::Io => {}
            _ => return Err(differs()),
        }
    }
    let header = header.map_err(|error| error.within(source.path().display()))?;
    if checksums.is_some_and(|checksums| checksums.header_bytes() != header.data_start()) {
        return Err(differs());
    }
    Ok(header)
}
