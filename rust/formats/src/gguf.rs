//! The header of a GGUF file, the format of llama.cpp: its metadata, and the types and places of its tensors.
//!
//! ```text
//! "GGUF"  u32 version  u64 n_tensors  u64 n_values
//! value   text key, u32 type, the value; text is a u64 length and UTF-8, an array a u32 type, a u64 count and the items
//! tensor  text name, u32 n_dims, u64 extents (the innermost first), u32 type, u64 offset
//! data    at the next multiple of `general.alignment`, or of 32; the offsets count from there
//! ```
//!
//! Numbers are little-endian. Arrays, such as the vocabulary, are passed over. Every length is compared with the size of the
//! file before it is used. Memory is bounded for any input: the names and texts of the header, of which there are at most
//! [`MAX_HEADER_BYTES`], and 200 bytes for each of at most [`MAX_TENSORS`] tensors and [`MAX_VALUES`] values.
//!
//! Sources: the specification of GGUF in ggml, and `GGMLQuantizationType` of the package `gguf`.

use reshard_core::dtype::Dtype;
use reshard_core::error::Printable;
use reshard_core::header::{
    MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_TENSORS, check_name, tensor_bytes,
};
use reshard_core::listed::{Listed, ListedTensor};
use reshard_core::region::{Dims, row_major_strides};
use reshard_core::shard_file::Format;
use reshard_core::source::Source;
use reshard_core::{Error, Kind, Result};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a file begins with.
const MAGIC: &[u8; 4] = b"GGUF";
/// Most values of the metadata.
pub const MAX_VALUES: u64 = 65_536;
/// Bytes that are read at once.
const WINDOW_BYTES: u64 = 64 << 10;
const MAX_DIMS: u32 = 4;
const MAX_KEY_BYTES: u64 = 65_535;
/// A longer text is passed over, such as a large template.
const MAX_TEXT_BYTES: u64 = 64 << 10;
const ALIGNMENT: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
const TYPE_TEXT: u32 = 8;
const TYPE_ARRAY: u32 = 9;

/// How the elements of a tensor are stored.
#[derive(Debug, PartialEq, Eq)]
pub struct ElementType {
    /// Its number in the file.
    pub id: u32,
    /// Its name, such as `Q4_K`.
    pub name: &'static str,
    /// Elements of a block.
    pub n_values: u64,
    /// Bytes of a block.
    pub n_bytes: u64,
    /// The dtype of the elements; `None`: they are computed from a block.
    pub dtype: Option<Dtype>,
}

const fn plain(id: u32, name: &'static str, n_bytes: u64, dtype: Dtype) -> ElementType {
    ElementType {
        id,
        name,
        n_values: 1,
        n_bytes,
        dtype: Some(dtype),
    }
}

const fn block(id: u32, name: &'static str, n_values: u64, n_bytes: u64) -> ElementType {
    ElementType {
        id,
        name,
        n_values,
        n_bytes,
        dtype: None,
    }
}

/// The types of elements.
pub static TYPES: [ElementType; 34] = [
    plain(0, "F32", 4, Dtype::F32),
    plain(1, "F16", 2, Dtype::F16),
    block(2, "Q4_0", 32, 18),
    block(3, "Q4_1", 32, 20),
    block(6, "Q5_0", 32, 22),
    block(7, "Q5_1", 32, 24),
    block(8, "Q8_0", 32, 34),
    block(9, "Q8_1", 32, 40),
    block(10, "Q2_K", 256, 84),
    block(11, "Q3_K", 256, 110),
    block(12, "Q4_K", 256, 144),
    block(13, "Q5_K", 256, 176),
    block(14, "Q6_K", 256, 210),
    block(15, "Q8_K", 256, 292),
    block(16, "IQ2_XXS", 256, 66),
    block(17, "IQ2_XS", 256, 74),
    block(18, "IQ3_XXS", 256, 98),
    block(19, "IQ1_S", 256, 50),
    block(20, "IQ4_NL", 32, 18),
    block(21, "IQ3_S", 256, 110),
    block(22, "IQ2_S", 256, 82),
    block(23, "IQ4_XS", 256, 136),
    plain(24, "I8", 1, Dtype::I8),
    plain(25, "I16", 2, Dtype::I16),
    plain(26, "I32", 4, Dtype::I32),
    plain(27, "I64", 8, Dtype::I64),
    plain(28, "F64", 8, Dtype::F64),
    block(29, "IQ1_M", 256, 56),
    plain(30, "BF16", 2, Dtype::Bf16),
    block(34, "TQ1_0", 256, 54),
    block(35, "TQ2_0", 256, 66),
    block(39, "MXFP4", 32, 17),
    block(40, "NVFP4", 64, 36),
    block(41, "Q1_0", 128, 18),
];

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An integer of any type.
    Int(i128),
    /// A number of 32 or 64 bits.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// An array, or a text that is too long to be kept: it was passed over.
    Skipped,
}

/// A tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// How its elements are stored.
    pub of: &'static ElementType,
    /// Its shape in elements, the innermost dim last.
    pub shape: Vec<u64>,
    /// Its first byte in the file.
    pub start: u64,
}

impl Tensor {
    /// Dtype and shape of what is stored. Blocks are bytes.
    pub fn stored(&self) -> (Dtype, Vec<u64>) {
        let mut shape = self.shape.clone();
        if let Some(dtype) = self.of.dtype {
            return (dtype, shape);
        }
        if let Some(last) = shape.last_mut() {
            *last = *last / self.of.n_values * self.of.n_bytes;
        }
        (Dtype::U8, shape)
    }
}

/// A header.
#[derive(Debug, Clone, PartialEq)]
pub struct Gguf {
    /// The metadata.
    pub values: BTreeMap<String, Value>,
    /// The tensors, in the order of the file.
    pub tensors: Vec<Tensor>,
}

/// How the core reads the tensors of a file.
pub fn format() -> Format {
    Format::Listed(Arc::new(|source| {
        let tensors = read(source)?.tensors.into_iter().map(|tensor| {
            let (dtype, shape) = tensor.stored();
            ListedTensor {
                dtype,
                strides: row_major_strides(&shape),
                shape,
                start: tensor.start,
                name: tensor.name,
            }
        });
        Listed::new(tensors.collect(), Vec::new(), source.n_bytes())
            .map_err(|error| error.path(source.path()))
    }))
}

/// Reads the header of a file.
///
/// # Errors
/// `Kind::Damaged` if the file violates the format, `Kind::Unsupported` for another version or an unknown type, `Kind::Io`
/// if a read fails.
pub fn read(source: &Source) -> Result<Gguf> {
    let parser = Parser {
        source,
        at: 0,
        end: source.n_bytes().min(MAX_HEADER_BYTES),
        first: 0,
        window: Vec::new(),
    };
    parser.file().map_err(|error| error.path(source.path()))
}

struct Parser<'f> {
    source: &'f Source,
    at: u64,
    /// The end of the file, or of what may be the header.
    end: u64,
    /// Position of `window` in the file.
    first: u64,
    window: Vec<u8>,
}

impl Parser<'_> {
    fn file(mut self) -> Result<Gguf> {
        self.version()?;
        let n_tensors = self.u64()?;
        let n_values = self.u64()?;
        if n_tensors > MAX_TENSORS as u64 || n_values > MAX_VALUES {
            let message = format!(
                "the file has {n_tensors} tensors and {n_values} values; at most {MAX_TENSORS} and {MAX_VALUES} are \
                 allowed"
            );
            return Err(Error::damaged(message));
        }
        let mut values = BTreeMap::new();
        for number in 0..n_values {
            let start = self.at;
            let at = |error: Error| error.within(format_args!("value {number} at byte {start}"));
            let key = self.text(MAX_KEY_BYTES, "its key").map_err(at)?;
            let value = self
                .value()
                .map_err(|error| at(error.within(format_args!("`{}`", Printable(&key)))))?;
            if values.contains_key(&key) {
                let message = format!("the value `{}` occurs twice", Printable(&key));
                return Err(Error::damaged(message));
            }
            values.insert(key, value);
        }
        let mut tensors = Vec::new();
        for number in 0..n_tensors {
            let start = self.at;
            let tensor = self.tensor();
            tensors.push(
                tensor.map_err(|error| {
                    error.within(format_args!("tensor {number} at byte {start}"))
                })?,
            );
        }
        self.place(&mut tensors, alignment(&values)?)?;
        Ok(Gguf { values, tensors })
    }

    fn version(&mut self) -> Result<()> {
        if self.end < 4 || self.bytes(4)? != MAGIC {
            return Err(Error::damaged("the file does not begin with `GGUF`"));
        }
        let version = self.u32()?;
        match version {
            2 | 3 => Ok(()),
            1 => Err(
                Error::new(Kind::Unsupported, "it is a GGUF file of version 1")
                    .hint("convert it with llama.cpp first"),
            ),
            _ if matches!(version.swap_bytes(), 2 | 3) => Err(Error::new(
                Kind::Unsupported,
                "it is a big-endian GGUF file",
            )),
            _ => Err(Error::new(
                Kind::Unsupported,
                format!("it is a GGUF file of version {version}; 2 and 3 are known"),
            )),
        }
    }

    fn value(&mut self) -> Result<Value> {
        let kind = self.u32()?;
        match kind {
            TYPE_TEXT => {
                let n_bytes = self.u64()?;
                if n_bytes > MAX_TEXT_BYTES {
                    self.skip(n_bytes, "the text")?;
                    return Ok(Value::Skipped);
                }
                Ok(Value::Text(self.utf8(n_bytes, "the text")?))
            }
            TYPE_ARRAY => {
                let of = self.u32()?;
                let n = self.u64()?;
                if of == TYPE_TEXT {
                    if n > (self.end - self.at) / 8 {
                        let message = format!("{n} texts are longer than the rest of the header");
                        return Err(Error::damaged(message));
                    }
                    for _ in 0..n {
                        let n_bytes = self.u64()?;
                        self.skip(n_bytes, "a text")?;
                    }
                    return Ok(Value::Skipped);
                }
                if of == TYPE_ARRAY {
                    let message = "it is an array of arrays";
                    return Err(Error::new(Kind::Unsupported, message));
                }
                let each = scalar_bytes(of)?;
                let n_bytes = n.saturating_mul(each);
                self.skip(n_bytes, "the array")?;
                Ok(Value::Skipped)
            }
            _ => {
                let n_bytes = scalar_bytes(kind)?;
                let mut bits = [0; 8];
                let bytes = self.bytes(n_bytes)?;
                bits[..bytes.len()].copy_from_slice(bytes);
                scalar(kind, u64::from_le_bytes(bits))
            }
        }
    }

    /// A tensor, whose start is still its offset in the data.
    fn tensor(&mut self) -> Result<Tensor> {
        let name = self.text(MAX_NAME_BYTES as u64, "its name")?;
        check_name(&name)?;
        let tensor = self.tensor_named(&name);
        tensor.map_err(|error| {
            let error = error.within(format_args!("`{}`", Printable(&name)));
            error.key(&name)
        })
    }

    fn tensor_named(&mut self, name: &str) -> Result<Tensor> {
        let n_dims = self.u32()?;
        if n_dims > MAX_DIMS {
            let message = format!("it has {n_dims} dims; at most {MAX_DIMS} are allowed");
            return Err(Error::damaged(message));
        }
        let mut shape = Vec::new();
        for _ in 0..n_dims {
            shape.push(self.u64()?);
        }
        shape.reverse();
        let id = self.u32()?;
        let start = self.u64()?;
        let of = TYPES.iter().find(|of| of.id == id).ok_or_else(|| {
            let message = format!("its elements have the type {id}, which is not known");
            Error::new(Kind::Unsupported, message)
        })?;
        let last = shape.last().copied().unwrap_or(1);
        if !last.is_multiple_of(of.n_values) {
            let message = format!(
                "its rows of {last} elements are no blocks of {} ({})",
                of.n_values, of.name
            );
            return Err(Error::damaged(message));
        }
        // The product of the elements must not overflow, either.
        tensor_bytes(of.dtype.unwrap_or(Dtype::F64), &shape).map_err(Error::damaged)?;
        Ok(Tensor {
            name: name.to_owned(),
            of,
            shape,
            start,
        })
    }

    /// Changes the offsets of tensors to positions in the file.
    fn place(&self, tensors: &mut [Tensor], alignment: u64) -> Result<()> {
        let n_bytes = self.source.n_bytes();
        let data = self.at.checked_next_multiple_of(alignment);
        let mut ends = Vec::new();
        for (number, tensor) in tensors.iter_mut().enumerate() {
            let fail = |message: String| {
                let text = format!("`{}` {message}", Printable(&tensor.name));
                Err(Error::damaged(text).key(&tensor.name))
            };
            if !tensor.start.is_multiple_of(alignment) {
                let offset = tensor.start;
                return fail(format!(
                    "has the offset {offset}, which is no multiple of {alignment}"
                ));
            }
            let (dtype, shape) = tensor.stored();
            let size = tensor_bytes(dtype, &shape).map_err(Error::damaged)?;
            let start = data.and_then(|data| data.checked_add(tensor.start));
            let end = start.and_then(|start| start.checked_add(size));
            let (Some(start), Some(end)) = (start, end.filter(|end| *end <= n_bytes)) else {
                return fail(format!(
                    "({} {}) reaches beyond the end of the file, which has {n_bytes} bytes",
                    tensor.of.name,
                    Dims(&tensor.shape)
                ));
            };
            tensor.start = start;
            if size > 0 {
                ends.push((start, end, number));
            }
        }
        let mut names: Vec<_> = tensors.iter().map(|tensor| &tensor.name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            let message = format!("`{}` is stored twice", Printable(pair[0]));
            return Err(Error::damaged(message).key(pair[0]));
        }
        ends.sort_unstable();
        match ends.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            Some(pair) => {
                let (first, second) = (&tensors[pair[0].2].name, &tensors[pair[1].2].name);
                let (a, b) = (Printable(first), Printable(second));
                Err(Error::damaged(format!("`{a}` and `{b}` overlap")).key(second))
            }
            None => Ok(()),
        }
    }

    // -- bytes

    /// The next bytes, of which there are at most a window.
    fn bytes(&mut self, n: u64) -> Result<&[u8]> {
        debug_assert!(n <= WINDOW_BYTES);
        let (at, file_bytes) = (self.at, self.source.n_bytes());
        if n > self.end - at {
            return Err(if self.end < file_bytes {
                Error::damaged(format!("the header has more than {MAX_HEADER_BYTES} bytes"))
            } else {
                let message = format!("the file ends inside its header, at byte {file_bytes}");
                Error::damaged(message).hint("the file is truncated: fetch it again")
            });
        }
        if at < self.first || at + n > self.first + self.window.len() as u64 {
            self.window
                .resize(WINDOW_BYTES.min(self.end - at) as usize, 0);
            self.source.read_at_or(at, &mut self.window, |_| {
                let message = format!("the file ends early: it had {file_bytes} bytes when opened");
                Error::damaged(message)
            })?;
            self.first = at;
        }
        self.at += n;
        Ok(&self.window[(at - self.first) as usize..][..n as usize])
    }

    fn u32(&mut self) -> Result<u32> {
        let bytes = self.bytes(4)?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    }

    fn u64(&mut self) -> Result<u64> {
        let bytes = self.bytes(8)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    }

    fn skip(&mut self, n: u64, what: &str) -> Result<()> {
        let rest = self.end - self.at;
        if n > rest {
            let message = format!("{what} has {n} bytes, and the header at most {rest} more");
            return Err(Error::damaged(message));
        }
        self.at += n;
        Ok(())
    }

    fn text(&mut self, most: u64, what: &str) -> Result<String> {
        let n = self.u64()?;
        if n == 0 || n > most {
            let message = format!("{what} has {n} bytes; 1 to {most} are allowed");
            return Err(Error::damaged(message));
        }
        self.utf8(n, what)
    }

    fn utf8(&mut self, n: u64, what: &str) -> Result<String> {
        let text = std::str::from_utf8(self.bytes(n)?).map(str::to_owned);
        text.map_err(|_| Error::damaged(format!("{what} is not UTF-8")))
    }
}

fn alignment(values: &BTreeMap<String, Value>) -> Result<u64> {
    let alignment = match values.get(ALIGNMENT) {
        None => Some(DEFAULT_ALIGNMENT),
        Some(Value::Int(n)) => u64::try_from(*n).ok(),
        Some(_) => None,
    };
    let found = alignment.filter(|n| n.is_power_of_two());
    found.ok_or_else(|| Error::damaged(format!("`{ALIGNMENT}` is no power of two")))
}

fn scalar_bytes(kind: u32) -> Result<u64> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        _ => Err(Error::damaged(format!(
            "it has the type {kind}, which is not known"
        ))),
    }
}

/// A value of the bytes, which are zeros from its end on.
fn scalar(kind: u32, bits: u64) -> Result<Value> {
    Ok(match kind {
        1 => Value::Int((bits as u8).cast_signed().into()),
        3 => Value::Int((bits as u16).cast_signed().into()),
        5 => Value::Int((bits as u32).cast_signed().into()),
        6 => Value::Float(f32::from_bits(bits as u32).into()),
        7 if bits > 1 => return Err(Error::damaged(format!("it is no truth value: {bits}"))),
        7 => Value::Bool(bits == 1),
        11 => Value::Int(bits.cast_signed().into()),
        12 => Value::Float(f64::from_bits(bits)),
        _ => Value::Int(bits.into()),
    })
}
