//! The table of a `.ckpt` file of `MindSpore`: a parser of the framing that does not read the content of tensors.
//!
//! The file is one protobuf message without a magic number or a table of contents:
//!
//! ```text
//! Checkpoint     1 repeated Value { 1 string tag; 2 TensorProto tensor; 3 MapTensorProto maptensor }
//! TensorProto    1 repeated int64 dims; 2 string tensor_type; 3 bytes tensor_content
//! ```
//!
//! Optionally `crc_num` and ten bytes with a CRC-32 of all preceding bytes follow. A tensor that is too large for one
//! value is stored in consecutive values with the same tag, type and dims; its content is the concatenation of theirs.
//!
//! A general decoder would load the complete file. This parser reads only the bytes between the contents, in small
//! windows, and compares every length with the size of the file. Memory is bounded for any input: at most 200 bytes per
//! value, for at most [`MAX_TENSORS`] values, and four times the bytes between the contents, of which there are at most
//! [`MAX_HEADER_BYTES`].
//!
//! This module handles the framing of one file. It does not interpret tensors, and verifies content only by the CRC.

use reshard_core::dtype::Dtype;
use reshard_core::error::Printable;
use reshard_core::header::{
    MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_RANK, MAX_TENSORS, check_name, tensor_bytes,
};
use reshard_core::listed::{FileCrc, Listed, ListedTensor, Split};
use reshard_core::region::Dims;
use reshard_core::shard_file::Format;
use reshard_core::source::Source;
use reshard_core::{Error, Kind, Result};
use std::sync::Arc;

/// Bytes that are read at once: a few small values, and few excess bytes for a large one.
const WINDOW_BYTES: usize = 4096;
/// Longest name of a type; known names have up to eight bytes.
const MAX_TYPE_BYTES: u64 = 64;
/// The marker before the CRC, and the bytes of both.
const CRC_MARK: &[u8] = b"crc_num";
const CRC_BYTES: u64 = CRC_MARK.len() as u64 + 10;
/// The type of a text value: four bytes per character.
const TEXT: &str = "str";

/// Field number and wire type of the known fields, encoded in one byte.
mod tag {
    pub(super) const VALUE: u8 = 0x0a; // Checkpoint.value
    pub(super) const NAME: u8 = 0x0a; // Value.tag
    pub(super) const TENSOR: u8 = 0x12; // Value.tensor
    pub(super) const TABLE: u8 = 0x1a; // Value.maptensor
    pub(super) const DIM: u8 = 0x08; // TensorProto.dims, not packed
    pub(super) const DIMS: u8 = 0x0a; // TensorProto.dims, packed
    pub(super) const TYPE: u8 = 0x12; // TensorProto.tensor_type
    pub(super) const CONTENT: u8 = 0x1a; // TensorProto.tensor_content
    /// First byte of a strategy file.
    pub(super) const OF_STRATEGY: u8 = 0x08;
}

/// How the core reads the tensors of a file.
pub fn format() -> Format {
    Format::Listed(Arc::new(read))
}

/// Parses a file.
///
/// A *record* is the content of one value. The stored name of a tensor in one record is its tag. The records of a split
/// tensor are one-dimensional and have the names `<tag>#<number>`.
///
/// # Errors
/// `Kind::Damaged` if the file violates the format, `Kind::Unsupported` for an unknown type, `Kind::Io` if a read fails.
pub fn read(source: &Source) -> Result<Listed> {
    let window = Window {
        source,
        file_bytes: source.n_bytes(),
        first: 0,
        bytes: Vec::new(),
    };
    let mut parser = Parser {
        window,
        at: 0,
        framing_bytes: 0,
        records: Vec::new(),
        splits: Vec::new(),
        texts: Vec::new(),
        partial: None,
    };
    let table = parser.file().and_then(|crc| {
        parser.check_names()?;
        let table = Listed::new(parser.records, Vec::new(), source.n_bytes())?
            .with_splits(parser.splits)
            .with_texts(parser.texts);
        Ok(match crc {
            Some(crc) => table.with_file_crc(crc),
            None => table,
        })
    });
    table.map_err(|error| error.path(source.path()))
}

fn duplicate(name: &str) -> Error {
    let message = format!(
        "`{}` occurs twice, and the values are not records of one tensor",
        Printable(name)
    );
    Error::damaged(message).key(name)
}

/// The bytes of the file around a position.
struct Window<'f> {
    source: &'f Source,
    file_bytes: u64,
    /// Position of `bytes` in the file.
    first: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    /// Returns `n` bytes from a position on. The range is inside the file and not longer than a window.
    fn bytes(&mut self, at: u64, n: usize) -> Result<&[u8]> {
        debug_assert!(n <= WINDOW_BYTES && at + n as u64 <= self.file_bytes);
        let is_loaded = at >= self.first && at + n as u64 <= self.first + self.bytes.len() as u64;
        if !is_loaded {
            let n_bytes = (self.file_bytes - at).min(WINDOW_BYTES as u64);
            self.bytes.resize(n_bytes as usize, 0);
            let file_bytes = self.file_bytes;
            self.source.read_at_or(at, &mut self.bytes, |_| {
                Error::damaged(format!(
                    "the file ends at or before byte {}: it had {file_bytes} bytes when opened",
                    at + n_bytes
                ))
            })?;
            self.first = at;
        }
        Ok(&self.bytes[(at - self.first) as usize..][..n])
    }
}

/// The fields of one `TensorProto`.
struct Tensor {
    dims: Vec<u64>,
    dtype: String,
    start: u64,
    end: u64,
}

/// A tensor whose records are being read.
struct PartialTensor {
    name: String,
    /// The name of the type in the file.
    type_name: String,
    dims: Vec<u64>,
    dtype: Dtype,
    contents: Vec<(u64, u64)>,
}

struct Parser<'f> {
    window: Window<'f>,
    at: u64,
    /// Number of bytes so far that are not content.
    framing_bytes: u64,
    records: Vec<ListedTensor>,
    splits: Vec<Split>,
    texts: Vec<String>,
    partial: Option<PartialTensor>,
}

impl Parser<'_> {
    fn file(&mut self) -> Result<Option<FileCrc>> {
        let file_bytes = self.window.file_bytes;
        if file_bytes == 0 {
            return Err(Error::damaged("the file is empty")
                .hint("the save was interrupted, or the disk was full"));
        }
        let mut crc = None;
        let mut n_values = 0_usize;
        while self.at < file_bytes {
            if file_bytes - self.at == CRC_BYTES && self.window.bytes(self.at, 7)? == CRC_MARK {
                crc = Some(self.crc()?);
                break;
            }
            let start = self.at;
            n_values += 1;
            if n_values > MAX_TENSORS {
                return Err(Error::damaged(format!(
                    "the file has more than {MAX_TENSORS} values"
                )));
            }
            self.value()
                .map_err(|error| error.within(format_args!("value {n_values} at byte {start}")))?;
            if self.framing_bytes > MAX_HEADER_BYTES {
                return Err(Error::damaged(format!(
                    "the file has more than {MAX_HEADER_BYTES} bytes between the contents of its tensors"
                )));
            }
        }
        if n_values == 0 {
            return Err(Error::damaged("the file holds no value"));
        }
        self.finish_tensor()?;
        Ok(crc)
    }

    fn crc(&mut self) -> Result<FileCrc> {
        let n_bytes = self.at;
        let bytes = self.window.bytes(n_bytes + CRC_MARK.len() as u64, 10)?;
        let number = bytes
            .iter()
            .fold(0_u128, |n, &byte| n << 8 | u128::from(byte));
        let crc = u32::try_from(number).map_err(|_| {
            Error::damaged(format!("the CRC at its end is {number}, more than 32 bits"))
        })?;
        Ok(FileCrc { n_bytes, crc })
    }

    /// Parses one `Value` of the file.
    fn value(&mut self) -> Result<()> {
        let file_bytes = self.window.file_bytes;
        let start = self.at;
        let first = self.byte(file_bytes)?;
        if first != tag::VALUE {
            return Err(no_value(first, start));
        }
        let len = self.varint(file_bytes).map_err(truncated)?;
        let end = self.end_of(len, file_bytes, "it").map_err(truncated)?;
        let (mut name, mut tensor, mut is_table) = (None, None, false);
        while self.at < end {
            let is_new = match self.byte(end)? {
                tag::NAME => name.replace(self.name(end)?).is_none(),
                tag::TENSOR => {
                    let len = self.varint(end)?;
                    let inner_end = self.end_of(len, end, "its tensor")?;
                    tensor.replace(self.tensor(inner_end)?).is_none()
                }
                tag::TABLE => {
                    let len = self.varint(end)?;
                    self.at = self.end_of(len, end, "its hash table")?;
                    !std::mem::replace(&mut is_table, true)
                }
                other => return Err(unknown(other, self.at - 1, "a value")),
            };
            if !is_new {
                return Err(Error::damaged("a field occurs twice"));
            }
        }
        let name = name.ok_or_else(|| Error::damaged("it has no tag"))?;
        let within = |error: Error| {
            let error = error.within(format_args!("`{}`", Printable(&name)));
            error.key(&name)
        };
        if is_table {
            let message = "it is a hash table; only tensors are supported";
            return Err(within(Error::new(Kind::Unsupported, message)));
        }
        let tensor = tensor.ok_or_else(|| within(Error::damaged("it holds no tensor")))?;
        self.framing_bytes += (end - start) - (tensor.end - tensor.start);
        self.add(&name, tensor).map_err(within)
    }

    fn name(&mut self, end: u64) -> Result<String> {
        let len = self.varint(end)?;
        if len > MAX_NAME_BYTES as u64 {
            let message = format!("its tag has {len} bytes; at most {MAX_NAME_BYTES} are allowed");
            return Err(Error::new(Kind::Unsupported, message));
        }
        let name = self.text(len, end, "its tag")?;
        check_name(&name)?;
        Ok(name)
    }

    fn text(&mut self, len: u64, end: u64, what: &str) -> Result<String> {
        let text_end = self.end_of(len, end, what)?;
        let bytes = self.window.bytes(self.at, len as usize)?;
        let text = std::str::from_utf8(bytes)
            .map_err(|_| Error::damaged(format!("{what} is not UTF-8")))?
            .to_owned();
        self.at = text_end;
        Ok(text)
    }

    /// Parses a `TensorProto` up to `end`.
    fn tensor(&mut self, end: u64) -> Result<Tensor> {
        let mut dims = Vec::new();
        let (mut dtype, mut content) = (None, None);
        while self.at < end {
            let is_new = match self.byte(end)? {
                tag::DIM => {
                    let dim = self.dim(end)?;
                    push_dim(&mut dims, dim)?;
                    true
                }
                tag::DIMS => {
                    let len = self.varint(end)?;
                    let dims_end = self.end_of(len, end, "its dims field")?;
                    while self.at < dims_end {
                        let dim = self.dim(dims_end)?;
                        push_dim(&mut dims, dim)?;
                    }
                    true
                }
                tag::TYPE => {
                    let len = self.varint(end)?;
                    if len > MAX_TYPE_BYTES {
                        let message = format!("the name of its type has {len} bytes");
                        return Err(Error::damaged(message));
                    }
                    dtype.replace(self.text(len, end, "its type")?).is_none()
                }
                tag::CONTENT => {
                    let len = self.varint(end)?;
                    let start = self.at;
                    self.at = self.end_of(len, end, "its content")?;
                    content.replace((start, self.at)).is_none()
                }
                other => return Err(unknown(other, self.at - 1, "a tensor")),
            };
            if !is_new {
                return Err(Error::damaged("a field of its tensor occurs twice"));
            }
        }
        let missing = |field| Error::damaged(format!("its tensor has no {field}"));
        let (start, end) = content.ok_or_else(|| missing("content"))?;
        Ok(Tensor {
            dims,
            dtype: dtype.ok_or_else(|| missing("type"))?,
            start,
            end,
        })
    }

    /// Adds a value to the current tensor, or begins the next tensor.
    fn add(&mut self, name: &str, tensor: Tensor) -> Result<()> {
        let Tensor {
            dims,
            dtype: type_name,
            start,
            end,
        } = tensor;
        if let Some(partial) = self.partial.as_mut().filter(|partial| partial.name == name) {
            if partial.dims != dims || partial.type_name != type_name {
                let message = format!(
                    "its records differ: {} {} and {} {}",
                    Printable(&partial.type_name),
                    Dims(&partial.dims),
                    Printable(&type_name),
                    Dims(&dims)
                );
                return Err(Error::damaged(message));
            }
            partial.contents.push((start, end));
            return Ok(());
        }
        self.finish_tensor()?;
        if type_name == TEXT {
            if !(end - start).is_multiple_of(4) {
                let n_bytes = end - start;
                let message = format!("the text has {n_bytes} bytes, which is not a multiple of 4");
                return Err(Error::damaged(message));
            }
            self.texts.push(name.to_owned());
            return Ok(());
        }
        self.partial = Some(PartialTensor {
            name: name.to_owned(),
            dtype: dtype_of(&type_name)?,
            type_name,
            dims,
            contents: vec![(start, end)],
        });
        Ok(())
    }

    /// Completes the current tensor: its records must have exactly the bytes that its dims need.
    fn finish_tensor(&mut self) -> Result<()> {
        let Some(partial) = self.partial.take() else {
            return Ok(());
        };
        let name = partial.name.clone();
        self.add_records(partial).map_err(|error| {
            let error = error.within(format_args!("`{}`", Printable(&name)));
            error.key(&name)
        })
    }

    fn add_records(&mut self, partial: PartialTensor) -> Result<()> {
        let PartialTensor {
            name,
            dims,
            dtype,
            contents,
            ..
        } = partial;
        // Contents are disjoint ranges of the file, so their sum does not overflow.
        let n_bytes: u64 = contents.iter().map(|(start, end)| end - start).sum();
        // Older writers store a scalar with the dims [0].
        let shape = if dims == [0] && n_bytes > 0 {
            Vec::new()
        } else {
            dims
        };
        let needed = tensor_bytes(dtype, &shape).map_err(Error::damaged)?;
        if n_bytes != needed {
            let message = format!(
                "{dtype} of shape {} needs {needed} bytes, found {n_bytes}",
                Dims(&shape)
            );
            return Err(Error::damaged(message));
        }
        let first = self.records.len();
        let unit_bytes = dtype.bits() / 8;
        let is_split = contents.len() > 1;
        for (i, &(start, end)) in contents.iter().enumerate() {
            let n = end - start;
            if !n.is_multiple_of(unit_bytes) {
                let message = format!("its record {i} ends inside an element");
                return Err(Error::new(Kind::Unsupported, message));
            }
            let (name, shape) = if is_split {
                (format!("{name}#{i}"), vec![n / unit_bytes])
            } else {
                (name.clone(), shape.clone())
            };
            self.records.push(ListedTensor {
                name,
                dtype,
                shape,
                strides: Vec::new(),
                start,
            });
        }
        if is_split {
            let parts = first..self.records.len();
            self.splits.push(Split { name, shape, parts });
        }
        Ok(())
    }

    /// Names of records, of split tensors and of text values share one namespace.
    fn check_names(&self) -> Result<()> {
        let mut names: Vec<&str> = self
            .splits
            .iter()
            .map(|split| split.name.as_str())
            .collect();
        names.extend(self.records.iter().map(|record| record.name.as_str()));
        names.extend(self.texts.iter().map(String::as_str));
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(duplicate(pair[0])),
            None => Ok(()),
        }
    }

    // -- the wire format

    /// End of a field of `len` bytes that begins at the current position. It must not exceed `end`; `what` names the
    /// field.
    fn end_of(&self, len: u64, end: u64, what: &str) -> Result<u64> {
        let rest = end - self.at;
        if len > rest {
            let message = format!("{what} has the length {len}, but only {rest} bytes are left");
            return Err(Error::damaged(message));
        }
        Ok(self.at + len)
    }

    fn byte(&mut self, end: u64) -> Result<u8> {
        if self.at >= end {
            return Err(Error::damaged(format!("it ends too early, at byte {end}")));
        }
        let byte = self.window.bytes(self.at, 1)?[0];
        self.at += 1;
        Ok(byte)
    }

    fn varint(&mut self, end: u64) -> Result<u64> {
        let start = self.at;
        let mut value = 0_u64;
        for shift in (0..70).step_by(7) {
            let byte = self.byte(end)?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        let message = format!("the number at byte {start} is too large");
        Err(Error::damaged(message))
    }

    fn dim(&mut self, end: u64) -> Result<u64> {
        let dim = self.varint(end)?;
        if i64::try_from(dim).is_err() {
            let message = format!("an extent of {} is negative", dim.cast_signed());
            return Err(Error::damaged(message));
        }
        Ok(dim)
    }
}

fn push_dim(dims: &mut Vec<u64>, dim: u64) -> Result<()> {
    if dims.len() == MAX_RANK {
        return Err(Error::damaged(format!("it has more than {MAX_RANK} dims")));
    }
    dims.push(dim);
    Ok(())
}

/// The dtype of a `tensor_type`.
fn dtype_of(name: &str) -> Result<Dtype> {
    Ok(match name {
        "Int8" => Dtype::I8,
        "UInt8" => Dtype::U8,
        "Int16" => Dtype::I16,
        "UInt16" => Dtype::U16,
        "Int32" => Dtype::I32,
        "UInt32" => Dtype::U32,
        "Int64" => Dtype::I64,
        "UInt64" => Dtype::U64,
        "Float16" => Dtype::F16,
        "Float32" => Dtype::F32,
        "Float64" => Dtype::F64,
        "BFloat16" => Dtype::Bf16,
        "Bool" => Dtype::Bool,
        other => {
            let message = format!("its type is `{}`, which is not supported", Printable(other));
            return Err(Error::new(Kind::Unsupported, message)
                .hint("supported are integers of 8 to 64 bits, Float16, Float32, Float64, BFloat16, Bool and str"));
        }
    })
}

fn unknown(byte: u8, at: u64, of: &str) -> Error {
    Error::damaged(format!(
        "byte {at} is {byte:#04x}, which is not the tag of a field of {of}"
    ))
}

fn truncated(error: Error) -> Error {
    error.hint("the file is truncated, or not a `.ckpt` file")
}

/// The error for a byte that is not the tag of a value.
fn no_value(byte: u8, at: u64) -> Error {
    let error = Error::damaged(format!(
        "it begins with {byte:#04x}; a value of a `.ckpt` file begins with {:#04x}",
        tag::VALUE
    ));
    match byte {
        _ if at > 0 => error.hint("the file was partly overwritten, or bytes were appended to it"),
        tag::OF_STRATEGY => error.hint(
            "this looks like a strategy file, which has the same suffix and holds no tensors: pass it as `strategy`",
        ),
        0 => error.hint("the file was allocated and not written, or its content was lost by the disk"),
        _ => error.hint("it is not a `.ckpt` file, or it is encrypted, which is not supported"),
    }
}
