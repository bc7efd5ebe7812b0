//! The meaning of the values of a pickle of `torch.save`: what plain Python or numpy has a type for, and what has none.
//!
//! Nothing is imported or called. A value that is none of plain Python becomes [`Object::Opaque`], with what it was to be
//! made of. The binding makes the objects of Python.

use crate::compressed::{decompressed, is_zstd};
use crate::pickle::{Id, Pickle, Record, Value};
use crate::torch_file::{Leaf, TorchFile};
use crate::zip::{Part, Window};
use reshard_core::header::MAX_RANK;
use reshard_core::source::{Method, Source};
use reshard_core::{Error, Kind, Result};
use std::borrow::Cow;
use std::path::Path;

/// Elements of the nested tuples of one key. The hash of a tuple visits them all, also those of shared tuples again.
const MAX_KEY_PARTS: usize = 100;
/// An item that is no tensor, unpacked.
const MAX_OBJECT_BYTES: u64 = 4 << 30;

/// The dtypes of numpy that are read, with the bytes of an element. They are little-endian.
const NUMPY_DTYPES: [(&str, u64); 14] = [
    ("b1", 1),
    ("i1", 1),
    ("i2", 2),
    ("i4", 4),
    ("i8", 8),
    ("u1", 1),
    ("u2", 2),
    ("u4", 4),
    ("u8", 8),
    ("f2", 2),
    ("f4", 4),
    ("f8", 8),
    ("c8", 8),
    ("c16", 16),
];

/// What a value of a pickle means. Values inside it are given by their numbers.
#[derive(Debug, Clone, PartialEq)]
pub enum Object<'a> {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// A larger integer: two's complement, least significant byte first.
    Long(&'a [u8]),
    /// A float.
    Float(f64),
    /// A complex number.
    Complex(f64, f64),
    /// Text.
    Text(&'a str),
    /// Bytes.
    Bytes(Cow<'a, [u8]>),
    /// A tuple.
    Tuple(&'a [Id]),
    /// A list.
    List(&'a [Id]),
    /// A set.
    Set(&'a [Id]),
    /// A frozenset.
    FrozenSet(&'a [Id]),
    /// A dict, also an `OrderedDict`, a `defaultdict` or a `Counter`.
    Dict(&'a [[Id; 2]]),
    /// A number of numpy: the first element of these.
    Scalar(Elements<'a>),
    /// An array of numpy.
    Array {
        /// Its elements.
        elements: Elements<'a>,
        /// Its shape.
        shape: Vec<u64>,
        /// Whether the first dim varies fastest.
        is_fortran: bool,
    },
    /// A tensor, where tensors are left out: the name of the function that makes it.
    Tensor(String),
    /// Anything else.
    Opaque {
        /// Module and name of the class or function.
        name: String,
        /// What it was to be made of; `None` if only the name is stored.
        record: Option<Record<'a>>,
    },
}

/// Elements of a dtype of numpy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elements<'a> {
    /// The dtype without its byte order, which is little-endian: `f8`.
    pub dtype: &'static str,
    /// The bytes of as many elements as they should be.
    pub data: Cow<'a, [u8]>,
}

/// The values of a pickle by their meaning.
#[derive(Debug, Clone, Copy)]
pub struct Objects<'a> {
    pickle: &'a Pickle,
    /// The file, if its tensors are left out.
    without_tensors: Option<&'a TorchFile>,
}

impl<'a> Objects<'a> {
    /// All values.
    pub fn new(pickle: &'a Pickle) -> Self {
        Self {
            pickle,
            without_tensors: None,
        }
    }

    /// The values of a file, of whose tensors only the names of their functions remain.
    pub fn without_tensors(file: &'a TorchFile) -> Self {
        Self {
            pickle: file.pickle(),
            without_tensors: Some(file),
        }
    }

    /// Whether a value is a plain one of a few bytes, which need not be shared.
    pub fn is_small(&self, id: Id) -> bool {
        matches!(
            self.pickle.get(id),
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_)
        )
    }

    /// The meaning of a value.
    pub fn get(&self, id: Id) -> Object<'a> {
        let opaque = |name, record| Object::Opaque { name, record };
        match self.pickle.get(id) {
            Value::None => Object::None,
            Value::Bool(value) => Object::Bool(value),
            Value::Int(value) => Object::Int(value),
            Value::Long(bytes) => Object::Long(bytes),
            Value::Float(value) => Object::Float(value),
            Value::Text(text) => Object::Text(text),
            Value::Bytes(bytes) => Object::Bytes(bytes.into()),
            Value::Tuple(items) => Object::Tuple(items),
            Value::List(items) => Object::List(items),
            Value::Set(items) => Object::Set(items),
            Value::Dict(items) => Object::Dict(items),
            Value::Global(module, name) => opaque(format!("{module}.{name}"), None),
            Value::Persistent(_) => opaque("torch.storage".into(), None),
            Value::Record(record) => {
                let (module, name) = self.pickle.name(record.function).unwrap_or(("", ""));
                let is_tensor = |file: &TorchFile| {
                    file.is_sharded_tensor(id)
                        || matches!(file.tensor(id), Ok(Some(_)))
                        || matches!(file.sharded(id), Ok(Some(_)))
                };
                if self.without_tensors.is_some_and(is_tensor) {
                    return Object::Tensor(format!("{module}.{name}"));
                }
                self.known(id, (module, name), record)
                    .unwrap_or_else(|| opaque(format!("{module}.{name}"), Some(record)))
            }
        }
    }

    /// Checks a key of a dict, or an element of a set.
    ///
    /// # Errors
    /// It is a tuple of too many parts.
    pub fn check_key(&self, id: Id) -> Result<()> {
        let mut n_parts = 0;
        let mut pending = vec![id];
        while let Some(part) = pending.pop() {
            n_parts += 1;
            if let Value::Tuple(items) = self.pickle.get(part) {
                n_parts += items.len();
                if n_parts > MAX_KEY_PARTS {
                    return Err(too_many_values());
                }
                pending.extend(items);
            }
        }
        Ok(())
    }

    /// The calls that make values of plain Python or of numpy.
    fn known(&self, id: Id, name: (&str, &str), record: Record<'_>) -> Option<Object<'a>> {
        let pickle = self.pickle;
        let arguments = pickle.sequence(record.arguments).unwrap_or_default();
        match (name, arguments) {
            (("collections", "OrderedDict" | "defaultdict" | "Counter"), _) => {
                pickle.items(id).map(Object::Dict)
            }
            (("builtins" | "__builtin__", "set"), [items]) => {
                pickle.sequence(*items).map(Object::Set)
            }
            (("builtins" | "__builtin__", "frozenset"), [items]) => {
                pickle.sequence(*items).map(Object::FrozenSet)
            }
            (("builtins" | "__builtin__", "complex"), [real, imaginary]) => {
                match (pickle.get(*real), pickle.get(*imaginary)) {
                    (Value::Float(real), Value::Float(imaginary)) => {
                        Some(Object::Complex(real, imaginary))
                    }
                    _ => None,
                }
            }
            (("_codecs", "encode") | ("builtins" | "__builtin__", "bytes"), _) => {
                self.bytes(id).map(Object::Bytes)
            }
            (("numpy._core.multiarray" | "numpy.core.multiarray", "scalar"), [dtype, data]) => {
                let (dtype, n_bytes) = self.numpy_dtype(*dtype)?;
                let data = self.bytes(*data)?;
                let is_whole = !data.is_empty() && (data.len() as u64).is_multiple_of(n_bytes);
                is_whole.then_some(Object::Scalar(Elements { dtype, data }))
            }
            (("numpy._core.multiarray" | "numpy.core.multiarray", "_reconstruct"), _) => {
                // (version, shape, dtype, whether it is in Fortran order, bytes)
                let &[_, shape, dtype, fortran, data] = pickle.sequence(record.state?)? else {
                    return None;
                };
                let (dtype, n_bytes) = self.numpy_dtype(dtype)?;
                let (shape, data) = (self.shape(shape)?, self.bytes(data)?);
                // Numpy refuses extents that overflow also beside a zero.
                let largest = shape
                    .iter()
                    .try_fold(n_bytes, |n, &extent| n.checked_mul(extent.max(1)));
                i64::try_from(largest?).ok()?;
                let n_bytes = shape.iter().product::<u64>() * n_bytes;
                (data.len() as u64 == n_bytes).then_some(Object::Array {
                    elements: Elements { dtype, data },
                    shape,
                    is_fortran: matches!(pickle.get(fortran), Value::Bool(true)),
                })
            }
            _ => None,
        }
    }

    /// Bytes, also those of protocol 2: text of which each character is a byte.
    fn bytes(&self, id: Id) -> Option<Cow<'a, [u8]>> {
        let pickle = self.pickle;
        let record = match pickle.get(id) {
            Value::Bytes(bytes) => return Some(bytes.into()),
            Value::Record(record) => record,
            _ => return None,
        };
        match (
            pickle.name(record.function)?,
            pickle.sequence(record.arguments)?,
        ) {
            (("_codecs", "encode"), [text, codec]) if pickle.text(*codec) == Some("latin1") => {
                let characters = pickle.text(*text).unwrap_or_default().chars();
                let bytes = characters.map(|c| u8::try_from(u32::from(c)).ok());
                bytes.collect::<Option<Vec<u8>>>().map(Cow::Owned)
            }
            (("builtins" | "__builtin__", "bytes"), []) => Some(Cow::Borrowed(b"")),
            _ => None,
        }
    }

    /// A plain numeric dtype of numpy, little-endian: `dtype('f8', False, True)` with its byte order as state. With the
    /// bytes of an element.
    fn numpy_dtype(&self, id: Id) -> Option<(&'static str, u64)> {
        let pickle = self.pickle;
        let record = pickle.call(id, "numpy", "dtype")?;
        let code = pickle.text(*pickle.sequence(record.arguments)?.first()?)?;
        let order = pickle.text(*pickle.sequence(record.state?)?.get(1)?)?;
        let known = NUMPY_DTYPES.into_iter().find(|(known, _)| *known == code);
        known.filter(|_| matches!(order, "<" | "|" | "="))
    }

    fn shape(&self, id: Id) -> Option<Vec<u64>> {
        let Value::Tuple(extents) = self.pickle.get(id) else {
            return None;
        };
        let extents = extents
            .iter()
            .map(|extent| u64::try_from(self.pickle.int(*extent)?).ok());
        let shape = extents.collect::<Option<Vec<u64>>>()?;
        (shape.len() <= MAX_RANK).then_some(shape)
    }
}

/// The error of values that would make too many objects.
pub fn too_many_values() -> Error {
    let message = "its values are nested too deep, or too many";
    Error::new(Kind::Unsupported, message)
}

/// The tensors and other values of a file of `torch.save`, by path.
///
/// # Errors
/// It cannot be read, is damaged, or has something that is refused.
pub fn read_file(path: &Path, follow_links: bool) -> Result<(TorchFile, Vec<(String, Leaf)>)> {
    let read = || {
        let source = Source::open(path, follow_links, Method::Read)?;
        let parts = [Part::of_small(&source)?];
        let file = TorchFile::read(Window::whole(&source).with(&parts))?;
        let leaves = file.leaves()?;
        Ok((file, leaves))
    };
    read().map_err(|error: Error| error.within(path.display()).path(path))
}

/// The object of `torch.save` in a range of a file, which is transformed as a folder of `torch.distributed.checkpoint`
/// says.
///
/// # Errors
/// As [`read_file`], or it is transformed in a way that is not known.
pub fn read_range(
    path: &Path,
    (start, n_bytes): (u64, u64),
    transforms: &[String],
) -> Result<TorchFile> {
    let read = || {
        let source = Source::open(path, false, Method::Read)?;
        if transforms.is_empty() {
            return TorchFile::read(Window::new(&source, start, n_bytes)?);
        }
        if !is_zstd(transforms) {
            let message = "it is transformed in a way that is not known";
            return Err(Error::new(Kind::Unsupported, message));
        }
        let source = decompressed(source, start, n_bytes, MAX_OBJECT_BYTES)?;
        TorchFile::read(Window::whole(&source))
    };
    read().map_err(|error| error.within(path.display()).path(path))
}
