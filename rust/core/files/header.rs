//! The header of a safetensors file: a strict parser of its JSON, and a writer.
//!
//! A shard file consists of 8 bytes (the length of the header, little-endian), the header, and the data of all tensors
//! without gaps. Every other file is rejected before anything of it is stored: lengths are compared with the size of
//! the file, sizes are computed with overflow checks, and every byte of the data belongs to exactly one tensor.
//!
//! Memory is bounded for malicious input as well: at most twice the size of the header plus 32 MiB. Names, shapes and
//! metadata are therefore kept as positions in the text of the header. For the same reason this module has its own
//! parser: a general JSON parser decodes escaped strings, holds a stack of open values and quotes wrong values in
//! messages, each of a size that the file controls, before a limit applies. The grammar has three levels and no
//! recursion.
//!
//! This module handles the header of one file. It does not interpret tensors and does not read data.

mod build;
mod tokens;

pub use build::build;
pub use tokens::NUMBER_END;

use crate::error::{Error, Kind, Printable, Result};
use crate::files::checksum::crc32c;
use crate::files::source::Source;
use crate::geometry::dtype::Dtype;
use std::hash::{BuildHasher, RandomState};
use std::io;
use tokens::{Scanner, Shape, Text, unescape};

/// Longest header in bytes, as in the reference implementation.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most tensors of one file.
pub const MAX_TENSORS: usize = 1_000_000;
/// Most dims of a tensor.
pub const MAX_RANK: usize = 32;
/// Longest name of a tensor in UTF-8 bytes.
pub const MAX_NAME_BYTES: usize = 1024;
/// Most entries of `__metadata__`.
pub const MAX_METADATA: usize = 1_000_000;

/// The length field before the header.
const LENGTH_BYTES: u64 = 8;
/// The key of a header that is not a tensor.
const METADATA: &str = "__metadata__";

/// A checked header: its tensors cover the data of the file exactly.
///
/// Tensors are numbered in the order of their data. A tensor without elements is numbered by its position.
///
/// ```
/// use reshard_core::dtype::Dtype;
/// use reshard_core::header::Header;
///
/// let json = br#"{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
/// let header = Header::parse(json.to_vec(), 24)?;
/// let w = header.entry(header.find("w").unwrap());
/// assert_eq!((w.dtype, w.shape, w.start, w.end), (Dtype::F32, vec![2, 3], 0, 24));
/// # Ok::<(), reshard_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Header {
    /// The text of the header. Escaped names and metadata have been decoded in place.
    text: Vec<u8>,
    /// In the order of the data.
    slots: Vec<Slot>,
    /// Hash of the name and number of each tensor, sorted, for the search by name.
    by_hash: Vec<(u64, u32)>,
    /// Its keys are random, so that a file cannot provoke collisions.
    hasher: RandomState,
    /// Sorted by key.
    metadata: Option<Vec<Pair>>,
    /// crc32c of all bytes before the data.
    checksum: u32,
}

/// One tensor of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// Its element type.
    pub dtype: Dtype,
    /// Its shape in elements.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the data.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
}

/// One tensor in 32 bytes, since there can be a million.
#[derive(Debug)]
struct Slot {
    start: u64,
    end: u64,
    name: Text,
    /// Position of the `[` of the shape in the text.
    shape_at: u32,
    dtype: Dtype,
}

/// Key and value of one metadata entry.
#[derive(Debug)]
struct Pair {
    key: Text,
    value: Text,
}

impl Header {
    /// Reads and checks the header of a shard file.
    ///
    /// # Errors
    /// `Kind::Damaged` if the file violates the format, `Kind::Unsupported` for an unknown dtype or a long name, `Kind::Io` if
    /// the read fails.
    pub fn read(source: &Source) -> Result<Self> {
        Self::read_unnamed(source).map_err(|error| error.path(source.path()))
    }

    fn read_unnamed(source: &Source) -> Result<Self> {
        let file_bytes = source.n_bytes();
        let read = |at: u64, into: &mut [u8]| {
            source.read_at_or(at, into, |_| {
                Error::damaged(format!(
                    "the file ends inside its header: it had {file_bytes} bytes when opened"
                ))
            })
        };
        let Some(rest_bytes) = file_bytes.checked_sub(LENGTH_BYTES) else {
            return Err(Error::damaged(format!(
                "the file has {file_bytes} bytes; a shard file begins with a length field of {LENGTH_BYTES} bytes"
            )));
        };
        let mut length = [0; LENGTH_BYTES as usize];
        read(0, &mut length)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES {
            return Err(Error::damaged(format!(
                "the length field of the header is {header_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed"
            )));
        }
        if header_bytes > rest_bytes {
            return Err(Error::damaged(format!(
                "the length field of the header is {header_bytes} bytes, but only {rest_bytes} bytes follow"
            ))
            .hint("the file is truncated, or not a safetensors file"));
        }
        // Memory grows with what is read, since a sparse file can have any size.
        let mut text = Vec::new();
        let mut piece_bytes = 1 << 20;
        while (text.len() as u64) < header_bytes {
            let at = text.len();
            let n = piece_bytes.min(header_bytes as usize - at);
            text.try_reserve_exact(n).map_err(|_| {
                let error = io::Error::from(io::ErrorKind::OutOfMemory);
                Error::io(
                    &format!("cannot allocate {header_bytes} bytes for the header of"),
                    source.path(),
                    &error,
                )
            })?;
            text.resize(at + n, 0);
            read(LENGTH_BYTES + at as u64, &mut text[at..])?;
            piece_bytes *= 2;
        }
        let checksum = crc32c(crc32c(0, &length), &text);
        let mut header = Self::parse(text, rest_bytes - header_bytes)?;
        header.checksum = checksum;
        Ok(header)
    }

    /// crc32c of all bytes before the data; 0 for a header from [`Self::parse`].
    pub fn checksum(&self) -> u32 {
        self.checksum
    }

    /// Parses and checks the text of a header that is followed by `data_bytes` bytes of data.
    ///
    /// # Errors
    /// `Kind::Damaged` if it violates the format, `Kind::Unsupported` for an unknown dtype or a long name.
    pub fn parse(json: Vec<u8>, data_bytes: u64) -> Result<Self> {
        if json.len() as u64 > MAX_HEADER_BYTES {
            return Err(Error::damaged(format!(
                "the header has {} bytes; at most {MAX_HEADER_BYTES} are allowed",
                json.len()
            )));
        }
        let text = std::str::from_utf8(&json).map_err(|error| {
            Error::damaged(format!(
                "the header is not UTF-8 from byte {} on",
                error.valid_up_to()
            ))
        })?;
        if !text.starts_with('{') {
            let found = text.chars().next().map_or("nothing".to_owned(), |c| {
                format!("`{}`", Printable(&c.to_string()))
            });
            return Err(Error::damaged(format!(
                "the header must start with `{{`, found {found}"
            )));
        }
        let mut pass = Pass {
            scanner: Scanner { text: &json, at: 0 },
            data_bytes,
            slots: Vec::new(),
            metadata: None,
            has_escapes: false,
        };
        pass.header()?;
        let Pass {
            slots,
            metadata,
            has_escapes,
            ..
        } = pass;
        let mut this = Self {
            text: json,
            slots,
            by_hash: Vec::new(),
            hasher: RandomState::new(),
            metadata,
            checksum: 0,
        };
        if has_escapes {
            this.decode_in_place()?;
        }
        this.order()?;
        this.check_coverage(data_bytes)?;
        Ok(this)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// First byte of the data in the file.
    pub fn data_start(&self) -> u64 {
        LENGTH_BYTES + self.text.len() as u64
    }

    /// Tensor `i` in the order of the data.
    ///
    /// # Panics
    /// If `i` is not below [`Self::len`].
    pub fn entry(&self, i: usize) -> Entry<'_> {
        let &Slot {
            start,
            end,
            name,
            shape_at,
            dtype,
        } = &self.slots[i];
        let shape = self.shape(shape_at);
        Entry {
            name: self.str(name),
            dtype,
            shape: shape.to_vec(),
            start,
            end,
        }
    }

    pub(crate) fn dtype(&self, i: usize) -> Dtype {
        self.slots[i].dtype
    }

    pub(crate) fn has_shape(&self, i: usize, shape: &[u64]) -> bool {
        *self.shape(self.slots[i].shape_at) == *shape
    }

    fn shape(&self, at: u32) -> Shape {
        let mut scanner = Scanner {
            text: &self.text,
            at: at as usize,
        };
        scanner.shape().expect("checked when parsed")
    }

    /// The number of the tensor with this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        let hash = self.hasher.hash_one(name.as_bytes());
        let first = first_from(&self.by_hash, hash);
        let same = self.by_hash[first..]
            .iter()
            .take_while(|&&(other, _)| other == hash);
        same.map(|&(_, i)| i as usize)
            .find(|&i| self.name(i) == name.as_bytes())
    }

    /// As [`Self::find`]; tensor `near` is tried first.
    pub(crate) fn find_near(&self, name: &str, near: usize) -> Option<usize> {
        let slot = self.slots.get(near);
        if slot.is_some_and(|slot| self.text[slot.name.range()] == *name.as_bytes()) {
            return Some(near);
        }
        self.find(name)
    }

    /// Keys and values of `__metadata__`, sorted by key; `None` if the header has none.
    pub fn metadata(&self) -> Option<impl ExactSizeIterator<Item = (&str, &str)>> {
        Some(
            self.metadata
                .as_ref()?
                .iter()
                .map(|pair| (self.str(pair.key), self.str(pair.value))),
        )
    }

    /// Decodes escaped names and metadata in place. Decoded text is never longer.
    fn decode_in_place(&mut self) -> Result<()> {
        let names = self.slots.iter_mut().map(|slot| &mut slot.name);
        let pairs = self
            .metadata
            .iter_mut()
            .flatten()
            .flat_map(|pair| [&mut pair.key, &mut pair.value]);
        for text in names.chain(pairs) {
            text.n_bytes = unescape(&mut self.text[text.range()])? as u32;
        }
        Ok(())
    }

    /// Sorts tensors by position and metadata by key, builds the table for the search by name, and rejects duplicates.
    fn order(&mut self) -> Result<()> {
        // A tensor without elements precedes the tensor at the same position. Ties have the order of the header.
        self.slots
            .sort_unstable_by_key(|slot| (slot.start, slot.end, slot.shape_at));
        let mut by_hash: Vec<(u64, u32)> = (0..self.slots.len())
            .map(|i| (self.hasher.hash_one(self.name(i)), i as u32))
            .collect();
        by_hash.sort_unstable_by(|&(a_hash, a), &(b_hash, b)| {
            a_hash
                .cmp(&b_hash)
                .then_with(|| self.name(a as usize).cmp(self.name(b as usize)))
        });
        for pair in by_hash.windows(2) {
            let (a, b) = (pair[0].1 as usize, pair[1].1 as usize);
            if pair[0].0 == pair[1].0 && self.name(a) == self.name(b) {
                let name = self.entry(a).name;
                return Err(Error::damaged(format!(
                    "tensor `{}` occurs twice in the header",
                    Printable(name)
                ))
                .key(name));
            }
        }
        self.by_hash = by_hash;

        let mut metadata = self.metadata.take();
        let text = |text: Text| &self.text[text.range()];
        if let Some(pairs) = &mut metadata {
            pairs.sort_unstable_by(|a, b| text(a.key).cmp(text(b.key)));
            if let Some(pair) = pairs
                .windows(2)
                .find(|pair| text(pair[0].key) == text(pair[1].key))
            {
                let key = Printable(self.str(pair[0].key));
                return Err(Error::damaged(format!(
                    "key `{key}` occurs twice in `{METADATA}`"
                )));
            }
        }
        self.metadata = metadata;
        Ok(())
    }

    /// Checks that every byte of the data belongs to exactly one tensor. A tensor without elements is between two
    /// others.
    fn check_coverage(&self, data_bytes: u64) -> Result<()> {
        let mut covered = 0;
        for (i, slot) in self.slots.iter().enumerate() {
            if slot.start != covered {
                let name = self.str(slot.name);
                let start = slot.start;
                let problem = if start > covered {
                    format!(
                        "bytes {covered} to {start} of the data, before tensor `{}`, belong to no tensor",
                        Printable(name)
                    )
                } else {
                    let other = Printable(self.str(self.slots[i - 1].name));
                    format!(
                        "tensor `{}` starts at byte {start} of the data, inside tensor `{other}`",
                        Printable(name)
                    )
                };
                return Err(Error::damaged(problem).key(name));
            }
            covered = slot.end;
        }
        if covered != data_bytes {
            return Err(Error::damaged(format!(
                "the tensors end at byte {covered} of the data, but the file has {data_bytes} bytes of data"
            ))
            .hint("the file was extended, or its header belongs to another file"));
        }
        Ok(())
    }

    fn name(&self, i: usize) -> &[u8] {
        &self.text[self.slots[i].name.range()]
    }

    fn str(&self, text: Text) -> &str {
        std::str::from_utf8(&self.text[text.range()]).expect("checked when parsed")
    }
}

/// The parser of the text of a header.
struct Pass<'t> {
    scanner: Scanner<'t>,
    data_bytes: u64,
    slots: Vec<Slot>,
    metadata: Option<Vec<Pair>>,
    /// Whether a name or metadata text contains a backslash.
    has_escapes: bool,
}

impl Pass<'_> {
    fn header(&mut self) -> Result<()> {
        let mut is_first = true;
        self.scanner.open(b'{')?;
        while self.scanner.more(b'}', &mut is_first)? {
            let text = self.scanner.string()?;
            let name = self
                .scanner
                .decoded(text, MAX_NAME_BYTES, "the name of a tensor")?;
            self.scanner.open(b':')?;
            if name == METADATA {
                self.metadata()?;
                continue;
            }
            let entry = check_name(&name).and_then(|()| self.entry(text));
            let slot = entry.map_err(|error| {
                error
                    .within(format_args!("tensor `{}`", Printable(&name)))
                    .key(&name)
            })?;
            self.slots.push(slot);
        }
        self.scanner.end()
    }

    fn metadata(&mut self) -> Result<()> {
        if self.metadata.is_some() {
            return Err(Error::damaged(format!(
                "`{METADATA}` occurs twice in the header"
            )));
        }
        let mut pairs = Vec::new();
        let mut is_first = true;
        self.scanner.open(b'{')?;
        while self.scanner.more(b'}', &mut is_first)? {
            if pairs.len() == MAX_METADATA {
                return Err(Error::damaged(format!(
                    "`{METADATA}` has more than {MAX_METADATA} entries"
                )));
            }
            let key = self.scanner.string()?;
            self.scanner.open(b':')?;
            let value = self
                .scanner
                .string()
                .map_err(|error| error.within(format_args!("`{METADATA}`")))?;
            self.has_escapes |= self.scanner.is_escaped(key) || self.scanner.is_escaped(value);
            pairs.push(Pair { key, value });
        }
        self.metadata = Some(pairs);
        Ok(())
    }

    fn entry(&mut self, name: Text) -> Result<Slot> {
        if self.slots.len() == MAX_TENSORS {
            return Err(Error::damaged(format!(
                "the header has more than {MAX_TENSORS} tensors"
            )));
        }
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        let mut is_first = true;
        self.scanner.open(b'{')?;
        while self.scanner.more(b'}', &mut is_first)? {
            let text = self.scanner.string()?;
            let field = self
                .scanner
                .decoded(text, MAX_NAME_BYTES, "the name of a field")?;
            self.scanner.open(b':')?;
            let is_new = match &*field {
                "dtype" => dtype.replace(self.dtype()?).is_none(),
                "shape" => {
                    let at = self.scanner.position() as u32;
                    shape.replace((at, self.scanner.shape()?)).is_none()
                }
                "data_offsets" => offsets.replace(self.offsets()?).is_none(),
                _ => {
                    let field = Printable(&field);
                    return Err(Error::damaged(format!(
                        "unknown field `{field}`; expected dtype, shape and data_offsets"
                    )));
                }
            };
            if !is_new {
                return Err(Error::damaged(format!("field `{field}` occurs twice")));
            }
        }
        let missing = |field| Error::damaged(format!("field `{field}` is missing"));
        let dtype = dtype.ok_or_else(|| missing("dtype"))?;
        let (shape_at, shape) = shape.ok_or_else(|| missing("shape"))?;
        let (start, end) = offsets.ok_or_else(|| missing("data_offsets"))?;
        let Some(n_bytes) = end.checked_sub(start) else {
            return Err(Error::damaged(format!(
                "the end of data_offsets [{start}, {end}] is before the start"
            )));
        };
        let needed_bytes = tensor_bytes(dtype, &shape).map_err(Error::damaged)?;
        if n_bytes != needed_bytes {
            return Err(Error::damaged(format!(
                "{dtype} of shape {:?} needs {needed_bytes} bytes, but data_offsets [{start}, {end}] have {n_bytes}",
                &*shape
            )));
        }
        if end > self.data_bytes {
            return Err(Error::damaged(format!(
                "its data ends at byte {end}, but the file has only {} bytes of data",
                self.data_bytes
            ))
            .hint("the file is truncated"));
        }
        self.has_escapes |= self.scanner.is_escaped(name);
        Ok(Slot {
            start,
            end,
            name,
            shape_at,
            dtype,
        })
    }

    fn dtype(&mut self) -> Result<Dtype> {
        let text = self.scanner.string()?;
        Dtype::parse(
            &self
                .scanner
                .decoded(text, MAX_NAME_BYTES, "the name of a dtype")?,
        )
    }

    fn offsets(&mut self) -> Result<(u64, u64)> {
        self.scanner.open(b'[')?;
        let start = self.scanner.number()?;
        self.scanner.open(b',')?;
        let end = self.scanner.number()?;
        self.scanner.open(b']')?;
        Ok((start, end))
    }
}

/// The number of the first entry with this hash or a larger one. Hashes are spread evenly, so the search begins where the
/// entry lies by proportion: a binary search over a large table would miss the cache at each step.
fn first_from(sorted: &[(u64, u32)], hash: u64) -> usize {
    let guess = ((u128::from(hash) * sorted.len() as u128) >> 64) as usize;
    let (mut low, mut high) = (guess, guess);
    let mut step = 8;
    while low > 0 && sorted[low - 1].0 >= hash {
        low = low.saturating_sub(step);
        step *= 2;
    }
    step = 8;
    while high < sorted.len() && sorted[high].0 < hash {
        high = (high + step).min(sorted.len());
        step *= 2;
    }
    low + sorted[low..high].partition_point(|&(other, _)| other < hash)
}

/// Whether all bytes of a text are of a kind. The loop has no early exit, so that it is compiled to vector instructions.
#[inline]
pub fn all_bytes(text: &str, is_of_kind: impl Fn(u8) -> bool) -> bool {
    (text.bytes()).fold(true, |are, byte| are & is_of_kind(byte))
}

/// Checks the name of a tensor: not empty, not too long, no control characters.
pub fn check_name(name: &str) -> Result<()> {
    let n_bytes = name.len();
    if name.is_empty() {
        return Err(Error::damaged("the name of a tensor is empty"));
    }
    if n_bytes > MAX_NAME_BYTES {
        let message = format!("the name has {n_bytes} bytes; at most {MAX_NAME_BYTES} are allowed");
        return Err(Error::new(Kind::Unsupported, message));
    }
    let is_plain = all_bytes(name, |byte| matches!(byte, b' '..=b'~')); // mostly, and faster
    if !is_plain && name.chars().any(char::is_control) {
        return Err(Error::damaged("the name contains a control character"));
    }
    Ok(())
}

/// Bytes of a tensor, or a message.
///
/// Stricter than [`Dtype::n_bytes`]: the product of the nonzero extents must not overflow either, since other readers
/// multiply all extents.
pub fn tensor_bytes(dtype: Dtype, shape: &[u64]) -> Result<u64, String> {
    let bits = shape
        .iter()
        .filter(|&&extent| extent != 0)
        .try_fold(dtype.bits(), |n, &extent| n.checked_mul(extent));
    match bits {
        None => Err(format!("the size of {dtype} of shape {shape:?} overflows")),
        Some(_) if shape.contains(&0) => Ok(0),
        Some(bits) if !bits.is_multiple_of(8) => Err(format!(
            "{dtype} of shape {shape:?} has {bits} bits, which is not an integer number of bytes"
        )),
        Some(bits) => Ok(bits / 8),
    }
}
