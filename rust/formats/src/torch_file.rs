//! A file of `torch.save`: its tensors by path, where their bytes lie, and its other values.
//!
//! ```text
//! zip       <base>/data.pkl       the object, as a pickle
//!           <base>/byteorder      "little"; absent in old files
//!           <base>/version        "3"
//!           <base>/data/<key>     the bytes of one storage
//! legacy    pickle(magic) pickle(1001) pickle(system) pickle(object) pickle([key, ...]), then for each key an
//!           int64 count and that many elements
//! ```
//!
//! A tensor is the call of a rebuild function with a storage, an offset, a size and strides, in elements. Only the rebuild
//! functions of dense tensors are known; any other call that is given a storage or a tensor is refused by name.
//!
//! Source: `torch/serialization.py` and `torch/_utils.py` of torch 2.15.

pub mod equal;
pub mod mesh;
mod regions;

pub use self::regions::Regions;

use crate::pickle::{Id, Pickle, Record, Value};
use crate::zip::{self, Member, Window};
use reshard_core::dtype::{Dtype, n_elements};
use reshard_core::error::Printable;
use reshard_core::header::{MAX_RANK, check_name};
use reshard_core::listed::{CrcRange, Listed, ListedTensor};
use reshard_core::region::row_major_strides;
use reshard_core::shard_file::Format;
use reshard_core::{Error, Kind, Result};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;

/// What a legacy file begins with.
const MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
const LEGACY_PROTOCOL: i64 = 1001;
/// Highest version of the zip layout that torch knows.
const MAX_VERSION: u64 = 10;
/// A larger pickle is refused: it would describe a hundred million tensors.
const MAX_PICKLE_BYTES: u64 = 4 << 30;
/// Nesting of containers.
const MAX_DEPTH: usize = 200;
/// Values by path beyond four for each object of the pickle: a shared container has the values of each path to it.
const MORE_LEAVES: usize = 100_000;
/// Bytes of a path.
const MAX_PATH_BYTES: usize = 4096;
/// Of a tuple that is the key of a dict.
const MAX_KEY_ITEMS: usize = 16;
/// Bytes of a tensor that repeats its elements by strides of 0.
const MAX_EXPANDED_BYTES: u64 = 1 << 30;

/// The bytes behind one or several tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Storage {
    /// Its key in the file.
    pub key: String,
    /// Where its bytes begin in the file.
    pub start: u64,
    /// How many there are.
    pub n_bytes: u64,
    /// CRC-32 of them, if the file has one.
    pub crc: Option<u32>,
}

/// A dense tensor: a strided view of a storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// The number of its storage in [`TorchFile::storages`].
    pub storage: usize,
    /// Its element type.
    pub dtype: Dtype,
    /// Its shape in elements.
    pub shape: Vec<u64>,
    /// Its first element in the storage.
    pub offset: u64,
    /// Elements between neighbours, one a dim.
    pub strides: Vec<u64>,
}

/// The part of a tensor that one rank of a device mesh holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sharded {
    /// The stored part.
    pub local: Tensor,
    /// The shape of the whole tensor in elements.
    pub shape: Vec<u64>,
    /// What says which part it is: the mesh and the placements.
    pub spec: Id,
}

/// A value at the end of a path.
#[derive(Debug, Clone, PartialEq)]
pub enum Leaf {
    /// A tensor.
    Tensor(Tensor),
    /// A part of a tensor.
    Sharded(Sharded),
    /// Regions of a tensor.
    Regions(Regions),
    /// Anything else: a number, text, an empty container, an opaque object.
    Other(Id),
}

/// A file, decoded.
#[derive(Debug)]
pub struct TorchFile {
    pickle: Pickle,
    storages: Vec<Storage>,
    by_key: HashMap<String, usize>,
    /// The range of the file to which the positions belong.
    is_legacy: bool,
}

impl TorchFile {
    /// Reads the description of a file, or of a range of it. What the tensors hold is not read.
    ///
    /// # Errors
    /// `Kind::Damaged` if it violates the format, `Kind::Unsupported` for what is refused.
    pub fn read(window: Window<'_>) -> Result<Self> {
        if window.n_bytes() == 0 {
            return Err(Error::damaged("the file is empty")
                .hint("the save was interrupted, or the disk was full"));
        }
        if is_zip(window)? {
            return Self::of_archive(unpacked(window)?);
        }
        let head = window.read(0, window.n_bytes().min(32))?;
        if is_legacy_head(&head) {
            Self::read_legacy(window)
        } else if head.first() == Some(&0x80) {
            Err(Error::new(
                Kind::Unsupported,
                "it is a pickle, but not of `torch.save`",
            ))
        } else {
            Err(Error::damaged(
                "it is no file of `torch.save`: neither a zip archive nor the older form",
            ))
        }
    }

    fn of_archive(archive: Archive<'_>) -> Result<Self> {
        let pickle = Pickle::decode(&archive.pickle);
        let pickle = pickle.map_err(|error| error.within("`data.pkl`"))?;
        let storages = archive.storages;
        let keys = storages.iter().map(|one| one.key.clone());
        Ok(Self {
            pickle,
            by_key: keys.zip(0..).collect(),
            storages,
            is_legacy: false,
        })
    }

    fn read_legacy(window: Window<'_>) -> Result<Self> {
        let mut reader = Legacy {
            window,
            at: 0,
            ahead: 1 << 16,
        };
        let magic = reader.pickle()?;
        if !matches!(magic.get(magic.root()), Value::Long(bytes) if *bytes == MAGIC) {
            return Err(Error::damaged("it is a pickle, but not of `torch.save`"));
        }
        let protocol = reader.pickle()?;
        if protocol.int(protocol.root()) != Some(LEGACY_PROTOCOL) {
            return Err(Error::new(
                Kind::Unsupported,
                "an unknown protocol of the older form",
            ));
        }
        let system = reader.pickle()?;
        let little = system
            .item(system.root(), "little_endian")
            .map(|id| system.get(id));
        match little {
            Some(Value::Bool(true)) => {}
            Some(Value::Bool(false)) => return Err(big_endian()),
            _ => return Err(Error::damaged("the file does not say its byte order")),
        }
        let pickle = reader.pickle()?;
        let keys = reader.pickle()?;
        let item_bytes = legacy_item_bytes(&pickle)?;
        let listed = keys
            .sequence(keys.root())
            .ok_or_else(|| Error::damaged("the keys of the storages are no list"))?;
        let mut by_key = HashMap::new();
        let mut storages = Vec::new();
        let mut at = reader.at;
        for id in listed {
            let key = keys
                .text(*id)
                .ok_or_else(|| Error::damaged("the key of a storage is no text"))?;
            let count = window.read(at, 8)?;
            let count = u64::from_le_bytes((*count).try_into().expect("eight bytes"));
            let item = item_bytes.get(key).copied();
            let item = item.ok_or_else(|| {
                Error::damaged(format!(
                    "no tensor says the type of storage `{}`",
                    Printable(key)
                ))
            })?;
            let n_bytes = count.checked_mul(item);
            let end = n_bytes
                .and_then(|n| at.checked_add(8)?.checked_add(n))
                .filter(|end| *end <= window.n_bytes());
            let (Some(n_bytes), Some(end)) = (n_bytes, end) else {
                let message = format!(
                    "storage `{}` of {count} elements ends beyond the file",
                    Printable(key)
                );
                return Err(Error::damaged(message));
            };
            if by_key.insert(key.to_owned(), storages.len()).is_some() {
                return Err(Error::damaged(format!(
                    "storage `{}` occurs twice",
                    Printable(key)
                )));
            }
            storages.push(Storage {
                key: key.to_owned(),
                start: window.start() + at + 8,
                n_bytes,
                crc: None,
            });
            at = end;
        }
        Ok(Self {
            pickle,
            storages,
            by_key,
            is_legacy: true,
        })
    }

    /// The values of the file.
    pub fn pickle(&self) -> &Pickle {
        &self.pickle
    }

    /// The storages.
    pub fn storages(&self) -> &[Storage] {
        &self.storages
    }

    /// The tensor that a value is, or `None` if it is something else.
    ///
    /// # Errors
    /// It is a tensor of a kind that is not known, or lies outside its storage.
    pub fn tensor(&self, id: Id) -> Result<Option<Tensor>> {
        let Some(record) = self.pickle.record(id) else {
            return Ok(None);
        };
        let Some((module, name)) = self.pickle.name(record.function) else {
            return Ok(None);
        };
        let arguments = self.arguments(record);
        match (module, name) {
            ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3") => {
                self.dense(name, arguments).map(Some)
            }
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state")
            | ("torch.nn.parameter", "Parameter") => {
                let inner = arguments
                    .first()
                    .ok_or_else(|| Error::damaged("a parameter without a tensor"))?;
                self.inner(*inner)
            }
            ("torch._tensor", "_rebuild_from_type_v2") => self.of_type(arguments),
            _ if self.makes_tensor(module, name, record) => {
                let message = format!(
                    "it holds a tensor made by `{}.{}`, which is not supported",
                    Printable(module),
                    Printable(name)
                );
                Err(Error::new(Kind::Unsupported, message))
            }
            _ => Ok(None),
        }
    }

    /// A tensor inside a call that wraps it.
    fn inner(&self, id: Id) -> Result<Option<Tensor>> {
        let Some(record) = self.pickle.record(id) else {
            return Err(Error::damaged("a parameter of something that is no tensor"));
        };
        match self.pickle.name(record.function) {
            // A wrapper in a wrapper has no use, and a cycle of them no end.
            Some(("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state")) => {
                Err(Error::new(Kind::Unsupported, "a parameter of a parameter"))
            }
            Some(("torch._tensor", "_rebuild_from_type_v2")) => {
                self.of_type(self.arguments(record))
            }
            _ => self.tensor(id).and_then(|found| {
                found
                    .ok_or_else(|| Error::damaged("a parameter of something that is no tensor"))
                    .map(Some)
            }),
        }
    }

    /// A tensor with Python attributes, which are dropped: (function, type, arguments, attributes).
    fn of_type(&self, arguments: &[Id]) -> Result<Option<Tensor>> {
        let [function, class, inner, ..] = *arguments else {
            return Err(Error::damaged("a tensor of a type with too few arguments"));
        };
        let class = self.pickle.name(class);
        let is_plain = matches!(
            class,
            Some(
                ("torch" | "torch._tensor", "Tensor")
                    | ("torch.nn.parameter" | "torch.nn", "Parameter" | "Buffer")
            )
        );
        if !is_plain {
            let (module, name) = class.unwrap_or(("", "?"));
            let wrapper = ("torch._utils", "_rebuild_wrapper_subclass");
            if self.pickle.name(function) == Some(wrapper)
                && let Some(whole) = self.whole_inside(arguments)?
            {
                return Ok(Some(whole));
            }
            let message = format!(
                "it holds a tensor of the type `{}.{}`, which is not supported",
                Printable(module),
                Printable(name)
            );
            return Err(Error::new(Kind::Unsupported, message));
        }
        let arguments = self
            .pickle
            .sequence(inner)
            .ok_or_else(|| Error::damaged("the arguments of a call are no tuple"))?;
        match self.pickle.name(function) {
            Some(("torch._utils", name @ ("_rebuild_tensor_v2" | "_rebuild_tensor_v3"))) => {
                self.dense(name, arguments).map(Some)
            }
            Some(("torch._utils", "_rebuild_parameter")) => {
                let inner = arguments
                    .first()
                    .ok_or_else(|| Error::damaged("a parameter without a tensor"))?;
                let record = self.pickle.record(*inner);
                match record.and_then(|record| self.pickle.name(record.function)) {
                    Some(("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor_v3")) => {
                        self.tensor(*inner)
                    }
                    _ => Err(Error::new(
                        Kind::Unsupported,
                        "a parameter of something that is no plain tensor",
                    )),
                }
            }
            other => {
                let (module, name) = other.unwrap_or(("", "?"));
                let message = format!(
                    "it holds a tensor made by `{}.{}`, which is not supported",
                    Printable(module),
                    Printable(name)
                );
                Err(Error::new(Kind::Unsupported, message))
            }
        }
    }

    /// The part of a tensor that a value is, or `None` if it is something else.
    ///
    /// The call is `(function, type, (type, dtype, size, ...), {"_local_tensor": ..., "_spec": ...})`.
    ///
    /// # Errors
    /// It is one, and its local tensor is not dense, is outside of its storage, or does not fit the whole.
    pub fn sharded(&self, id: Id) -> Result<Option<Sharded>> {
        let called = |id: Id| {
            let record = self.pickle.record(id)?;
            Some((self.pickle.name(record.function)?, self.arguments(record)))
        };
        let mut call = called(id);
        if let Some((("torch._utils", "_rebuild_parameter"), [inner, ..])) = call {
            call = called(*inner);
        }
        let Some((("torch._tensor", "_rebuild_from_type_v2"), [_, class, made, attributes, ..])) =
            call
        else {
            return Ok(None);
        };
        if !matches!(self.pickle.name(*class), Some((module, "DTensor")) if module.starts_with("torch.distributed."))
        {
            return Ok(None);
        }
        let bad = || Error::damaged("a DTensor without its local tensor or its placements");
        let Some([_, dtype, size, ..]) = self.pickle.sequence(*made) else {
            return Err(bad());
        };
        let (dtype, shape) = (named_dtype(&self.pickle, *dtype)?, self.extents(*size)?);
        let parts = self
            .pickle
            .sequence(*attributes)
            .unwrap_or(std::slice::from_ref(attributes));
        let attribute = |name: &str| {
            let mut parts = parts.iter().rev();
            parts.find_map(|one| self.pickle.item(*one, name))
        };
        let (Some(local), Some(spec)) = (attribute("_local_tensor"), attribute("_spec")) else {
            return Err(bad());
        };
        let local = self.not_nested(local)?.ok_or_else(|| {
            let message = "a DTensor whose local tensor is no dense tensor, which is not supported";
            Error::new(Kind::Unsupported, message)
        })?;
        if local.dtype != dtype || local.shape.len() != shape.len() {
            return Err(Error::damaged(
                "the dtype or the number of dims of a DTensor differ from those of its local tensor",
            ));
        }
        Ok(Some(Sharded { local, shape, spec }))
    }

    /// Of a tensor that is made of others, the one that holds its values: the only one among its attributes, apart from
    /// those that torchao computes from it, and of its shape and element type. `None` if there is no such one, or a
    /// container among them holds tensors.
    ///
    /// The call is `(function, type, (type, dtype, size, ...), attributes)`.
    fn whole_inside(&self, call: &[Id]) -> Result<Option<Tensor>> {
        let [_, kind, made, attributes, ..] = *call else {
            return Ok(None);
        };
        // Its local tensor can be one of several partial sums, with the shape of the whole.
        if self
            .pickle
            .name(kind)
            .is_some_and(|(_, name)| name == "DTensor")
        {
            return Ok(None);
        }
        let Some([_, dtype, size, ..]) = self.pickle.sequence(made) else {
            return Ok(None);
        };
        let (dtype, shape) = (named_dtype(&self.pickle, *dtype)?, self.extents(*size)?);
        // With `__slots__` they are a pair of mappings.
        let parts = self
            .pickle
            .sequence(attributes)
            .unwrap_or(std::slice::from_ref(&attributes));
        let mut found: Option<Tensor> = None;
        let mut seen = HashSet::new();
        for [key, value] in parts
            .iter()
            .filter_map(|one| self.pickle.items(*one))
            .flatten()
        {
            let is_computed = |name: &str| name.starts_with("_precomputed");
            if self.pickle.text(*key).is_some_and(is_computed) {
                continue;
            }
            if !self.is_tensor(*value) {
                if self.holds_tensors(*value, &mut seen) {
                    return Ok(None);
                }
                continue;
            }
            // A tensor inside it that is made of others again is not looked into: a cycle of them has no end.
            match self.not_nested(*value)? {
                Some(tensor) if tensor.dtype == dtype && tensor.shape == shape => {
                    if found.as_ref().is_some_and(|known| *known != tensor) {
                        return Ok(None);
                    }
                    found = Some(tensor);
                }
                _ => return Ok(None),
            }
        }
        Ok(found)
    }

    /// Whether there is a tensor or a storage in a value that was not seen before, or more than can be looked at.
    fn holds_tensors(&self, id: Id, seen: &mut HashSet<Id>) -> bool {
        let mut todo = vec![id];
        while let Some(id) = todo.pop() {
            if !seen.insert(id) {
                continue;
            }
            if seen.len() > MAX_LOOKED_AT || todo.len() > MAX_LOOKED_AT {
                return true;
            }
            match self.pickle.get(id) {
                Value::Persistent(_) => return true,
                Value::Tuple(items) | Value::List(items) | Value::Set(items) => todo.extend(items),
                Value::Dict(items) => todo.extend(items.iter().flatten()),
                Value::Record(record) => {
                    let name = self.pickle.name(record.function);
                    if name.is_some_and(|(module, name)| self.makes_tensor(module, name, record)) {
                        return true;
                    }
                    todo.push(record.arguments);
                    todo.extend(record.state);
                    todo.extend(record.fields.iter().flat_map(|(_, values)| *values));
                    todo.extend(record.items.iter().flatten());
                    todo.extend(record.appended);
                }
                _ => {}
            }
        }
        false
    }

    /// How many values are looked at to learn what a value is, if they are many. Values can share them.
    fn n_looked_at(&self, id: Id) -> usize {
        let Some(record) = self.pickle.record(id) else {
            return 0;
        };
        let given = self.arguments(record);
        let attributes = given.get(3).copied();
        let parts = attributes.map(|one| {
            let parts = self.pickle.sequence(one);
            parts.map_or_else(|| vec![one], <[Id]>::to_vec)
        });
        let in_parts = parts.iter().flatten();
        let n_items = in_parts.filter_map(|one| Some(1 + self.pickle.items(*one)?.len()));
        let n = given.len() + n_items.sum::<usize>();
        if n > MAX_LOOKED_AT { n } else { 0 }
    }

    /// The dense tensor that a value is, or the one of a parameter that it is.
    fn not_nested(&self, id: Id) -> Result<Option<Tensor>> {
        let called = |id: Id| {
            let record = self.pickle.record(id)?;
            Some((self.pickle.name(record.function)?, self.arguments(record)))
        };
        let mut called_here = called(id);
        if let Some((("torch._utils", "_rebuild_parameter"), [inner, ..])) = called_here {
            called_here = called(*inner);
        }
        match called_here {
            Some((
                ("torch._utils", name @ ("_rebuild_tensor_v2" | "_rebuild_tensor_v3")),
                arguments,
            )) => self.dense(name, arguments).map(Some),
            _ => Ok(None),
        }
    }

    fn arguments(&self, record: Record<'_>) -> &[Id] {
        self.pickle.sequence(record.arguments).unwrap_or_default()
    }

    fn is_tensor(&self, id: Id) -> bool {
        let Some(record) = self.pickle.record(id) else {
            return false;
        };
        let name = self.pickle.name(record.function);
        name.is_some_and(|(module, name)| self.makes_tensor(module, name, record))
    }

    /// Whether a call is one of torch that makes a tensor, or is given a storage or a tensor.
    fn makes_tensor(&self, module: &str, name: &str, record: Record<'_>) -> bool {
        let is_torch = module == "torch" || module.starts_with("torch.");
        if is_torch
            && (name.contains("rebuild") || name.ends_with("Storage") || name.ends_with("Tensor"))
        {
            return true;
        }
        let mut given = self.arguments(record).iter();
        given.any(|id| match self.pickle.get(*id) {
            Value::Persistent(_) => true,
            Value::Record(inner) => matches!(
                self.pickle.name(inner.function),
                Some(("torch._utils" | "torch._tensor", name)) if name.contains("rebuild")
            ),
            _ => false,
        })
    }

    /// (storage, offset, size, strides, gradient, hooks[, dtype], marks) in elements of the storage's type, or of the dtype,
    /// which only version 3 has.
    fn dense(&self, function: &str, arguments: &[Id]) -> Result<Tensor> {
        let [storage, offset, size, strides, ref rest @ ..] = *arguments else {
            return Err(Error::damaged("a tensor with too few arguments"));
        };
        let is_v3 = function == "_rebuild_tensor_v3";
        let dtype = rest.get(2).copied().filter(|_| is_v3);
        // `conj` or `neg`: torch conjugates or negates the values of the storage when they are used.
        if let Some(marks) = rest.get(if is_v3 { 3 } else { 2 }).copied() {
            let is_unmarked = matches!(self.pickle.get(marks), Value::None)
                || self.pickle.items(marks).is_some_and(<[_]>::is_empty);
            if !is_unmarked {
                let message = "a tensor whose stored values torch conjugates or negates, which is not supported";
                return Err(Error::new(Kind::Unsupported, message)
                    .hint("load it with torch and save `tensor.resolve_conj().resolve_neg()`"));
            }
        }
        let Value::Persistent(id) = self.pickle.get(storage) else {
            return Err(Error::damaged("a tensor without a storage"));
        };
        let (class, key, numel) = self.storage_id(id)?;
        let dtype = match dtype {
            Some(dtype) => named_dtype(&self.pickle, dtype)?,
            None => class
                .ok_or_else(|| Error::damaged("a tensor of an untyped storage says no dtype"))?,
        };
        let item = dtype.unit().1;
        let number = self.by_key.get(key).copied();
        let number = number.ok_or_else(|| {
            Error::damaged(format!("storage `{}` is not in the file", Printable(key)))
        })?;
        let stored = &self.storages[number];
        let expected = numel.checked_mul(class.map_or(1, |class| class.unit().1));
        if expected != Some(stored.n_bytes) {
            let message = format!(
                "storage `{}` has {} bytes, the tensors over it expect {numel} elements",
                Printable(key),
                stored.n_bytes
            );
            return Err(Error::damaged(message));
        }
        let shape = self.extents(size)?;
        let strides = self.extents(strides)?;
        let offset = self.extent(offset)?;
        if shape.len() != strides.len() || shape.len() > MAX_RANK {
            let message = format!(
                "a tensor of {} dims with {} strides, at most {MAX_RANK} are read",
                shape.len(),
                strides.len()
            );
            return Err(Error::damaged(message));
        }
        let n = n_elements(&shape);
        if n == Some(0) {
            return Ok(Tensor {
                storage: number,
                dtype,
                strides: row_major_strides(&shape),
                shape,
                offset: 0,
            });
        }
        let outside = || {
            Error::damaged(format!(
                "a tensor reaches beyond storage `{}`",
                Printable(key)
            ))
        };
        let last = shape
            .iter()
            .zip(&strides)
            .try_fold(offset, |at, (extent, stride)| {
                at.checked_add((extent - 1).checked_mul(*stride)?)
            });
        let end = last.and_then(|last| last.checked_add(1)?.checked_mul(item));
        if end.is_none_or(|end| end > stored.n_bytes) {
            return Err(outside());
        }
        let n_bytes = n.and_then(|n| n.checked_mul(item)).ok_or_else(outside)?;
        if n_bytes > stored.n_bytes && n_bytes > MAX_EXPANDED_BYTES {
            let message = format!(
                "a tensor of {n_bytes} bytes repeats the {} bytes of its storage; at most {MAX_EXPANDED_BYTES} are read",
                stored.n_bytes
            );
            return Err(Error::new(Kind::Unsupported, message));
        }
        Ok(Tensor {
            storage: number,
            dtype,
            shape,
            offset,
            strides,
        })
    }

    /// Element type, key and number of elements of a storage: ('storage', class, key, location, numel[, view]).
    fn storage_id(&self, id: Id) -> Result<(Option<Dtype>, &str, u64)> {
        let bad = || Error::damaged("the id of a storage is not one of `torch.save`");
        let parts = self.pickle.sequence(id).ok_or_else(bad)?;
        let is_right = parts.len() == if self.is_legacy { 6 } else { 5 };
        if !is_right || self.pickle.text(parts[0]) != Some("storage") {
            return Err(bad());
        }
        if self.is_legacy && !matches!(self.pickle.get(parts[5]), Value::None) {
            return Err(Error::new(
                Kind::Unsupported,
                "a storage that is a view of another storage",
            ));
        }
        let class = storage_class(&self.pickle, parts[1])?;
        let key = self.pickle.text(parts[2]).ok_or_else(bad)?;
        let numel = self.extent(parts[4])?;
        Ok((class, key, numel))
    }

    fn extent(&self, id: Id) -> Result<u64> {
        let int = self
            .pickle
            .int(id)
            .ok_or_else(|| Error::damaged("a size, stride or offset that is no integer"))?;
        u64::try_from(int).map_err(|_| Error::damaged(format!("a size, stride or offset of {int}")))
    }

    fn extents(&self, id: Id) -> Result<Vec<u64>> {
        let ids = self
            .pickle
            .sequence(id)
            .ok_or_else(|| Error::damaged("a size or strides that are no tuple"))?;
        ids.iter().map(|id| self.extent(*id)).collect()
    }

    /// All tensors and other values by path: keys of dicts and positions in lists and tuples, joined with dots.
    ///
    /// # Errors
    /// Containers are nested too deep or repeat without end, or two values have one path.
    pub fn leaves(&self) -> Result<Leaves> {
        let mut collector = Collector {
            file: self,
            leaves: Vec::new(),
            n_items: 0,
            open: Vec::new(),
            path: String::new(),
        };
        collector.visit(self.pickle.root())?;
        let mut paths = HashSet::with_capacity(collector.leaves.len());
        if let Some((path, _)) = collector
            .leaves
            .iter()
            .find(|(path, _)| !paths.insert(path.as_str()))
        {
            return Err(Error::new(
                Kind::Unsupported,
                format!("two values have the path `{}`", Printable(path)),
            ));
        }
        Ok(collector.leaves)
    }
}

/// How the core reads the tensors of a file: each under its path, behind a prefix. The file can be a range of another one:
/// its first byte and its size.
pub fn format(range: Option<(u64, u64)>, prefix: String) -> Format {
    Format::Listed(Arc::new(move |source| {
        let window = match range {
            None => Window::whole(source),
            Some((start, n_bytes)) => Window::new(source, start, n_bytes)?,
        };
        Ok(described(window, source.n_bytes(), &prefix)?.0)
    }))
}

/// Values that are looked at to learn what one value is.
const MAX_LOOKED_AT: usize = 256;

/// Values of a file by path.
pub type Leaves = Vec<(String, Leaf)>;

/// The table of a file, or of a range of one, the file, and its values that are no whole tensors.
///
/// # Errors
/// As [`TorchFile::read`] and [`TorchFile::leaves`], or a tensor has a name that is refused.
pub fn described(
    window: Window<'_>,
    file_bytes: u64,
    prefix: &str,
) -> Result<(Listed, TorchFile, Leaves)> {
    let file = TorchFile::read(window)?;
    let (mut tensors, mut others) = (Vec::new(), Vec::new());
    for (name, leaf) in file.leaves()? {
        let name = if prefix.is_empty() {
            name
        } else {
            [prefix, name.as_str()].concat()
        };
        if !name.is_empty() && !matches!(leaf, Leaf::Other(_)) {
            check_name(&name).map_err(|error| {
                error
                    .within(format_args!("tensor `{}`", Printable(&name)))
                    .key(&name)
            })?;
        }
        if let Leaf::Tensor(tensor) = leaf {
            tensors.push(tensor.listed(name, &file.storages));
            continue;
        }
        let stored = leaf.stored(&name).into_iter();
        tensors.extend(stored.map(|(name, tensor)| tensor.clone().listed(name, &file.storages)));
        others.push((name, leaf));
    }
    let table = Listed::new(tensors, crc_ranges(&file.storages), file_bytes)?;
    Ok((table, file, others))
}

impl Leaf {
    /// The stored tensors of a value, by their names in the table of the file.
    pub fn stored(&self, name: &str) -> Vec<(String, &Tensor)> {
        match self {
            Self::Tensor(tensor) | Self::Sharded(Sharded { local: tensor, .. }) => {
                vec![(name.to_owned(), tensor)]
            }
            Self::Regions(regions) => {
                let held = regions.named(name);
                held.map(|(name, _, tensor)| (name, tensor)).collect()
            }
            Self::Other(_) => Vec::new(),
        }
    }
}

impl Tensor {
    /// The tensor as an entry of the core's table.
    pub fn listed(self, name: String, storages: &[Storage]) -> ListedTensor {
        let start = storages[self.storage].start + self.offset * self.dtype.unit().1;
        ListedTensor {
            name,
            dtype: self.dtype,
            shape: self.shape,
            strides: self.strides,
            start,
        }
    }
}

/// The checksums of storages that have one.
pub fn crc_ranges(storages: &[Storage]) -> Vec<CrcRange> {
    let with_crc = storages.iter().filter(|storage| storage.n_bytes > 0);
    with_crc
        .filter_map(|storage| {
            Some(CrcRange {
                start: storage.start,
                n_bytes: storage.n_bytes,
                crc: storage.crc?,
            })
        })
        .collect()
}

/// Collects the values of a file by path.
struct Collector<'a> {
    file: &'a TorchFile,
    leaves: Leaves,
    /// Items of the dicts that were walked.
    n_items: usize,
    /// The containers around the value.
    open: Vec<Id>,
    path: String,
}

impl<'a> Collector<'a> {
    fn visit(&mut self, id: Id) -> Result<()> {
        let pickle: &'a Pickle = &self.file.pickle;
        self.n_items += self.file.n_looked_at(id);
        self.check_unfolded(self.n_items)?;
        let within = |error: Error, path: &str| error.within(format_args!("`{}`", Printable(path)));
        if let Some(sharded) = self
            .file
            .sharded(id)
            .map_err(|error| within(error, &self.path))?
        {
            return self.leaf(Leaf::Sharded(sharded));
        }
        let n_regions = self.file.n_regions(id);
        self.n_items += n_regions;
        self.check_unfolded(self.n_items)?;
        if let Some(regions) = self
            .file
            .regions(id)
            .map_err(|error| within(error, &self.path))?
        {
            return self.leaf(Leaf::Regions(regions));
        }
        if let Some(tensor) = self
            .file
            .tensor(id)
            .map_err(|error| within(error, &self.path))?
        {
            return self.leaf(Leaf::Tensor(tensor));
        }
        let is_size = pickle.call(id, "torch", "Size").is_some();
        if let Some(items) = pickle.items(id) {
            // A key that is set again keeps its place and gets the last value. The number 1 and the text "1" are two
            // keys with one path, which `leaves` refuses.
            let (mut texts, mut others) = (HashMap::new(), HashMap::new());
            let mut children: Vec<(Cow<'a, str>, Id)> = Vec::new();
            // A dict that is shared is walked for each place.
            self.n_items += items.len();
            self.check_unfolded(self.n_items)?;
            for [key, value] in items {
                let name = key_text(pickle, *key)?;
                if name.len() > MAX_PATH_BYTES {
                    return Err(long_key());
                }
                let next = children.len();
                let place = match &name {
                    Cow::Borrowed(text) => *texts.entry(*text).or_insert(next),
                    Cow::Owned(text) => {
                        let kind = (key_kinds(pickle, *key), text.clone());
                        *others.entry(kind).or_insert(next)
                    }
                };
                match children.get_mut(place) {
                    Some(child) => child.1 = *value,
                    None => children.push((name, *value)),
                }
            }
            return self.children(id, children);
        }
        if let (Some(items), false) = (pickle.sequence(id), is_size) {
            let children = items
                .iter()
                .enumerate()
                .map(|(i, id)| (i.to_string().into(), *id))
                .collect();
            return self.children(id, children);
        }
        self.leaf(Leaf::Other(id))
    }

    fn leaf(&mut self, leaf: Leaf) -> Result<()> {
        self.check_unfolded(self.leaves.len() + 1)?;
        if self.path.len() > MAX_PATH_BYTES {
            return Err(Error::new(
                Kind::Unsupported,
                format!(
                    "the path `{}...` has more than {MAX_PATH_BYTES} bytes",
                    Printable(&self.path)
                ),
            ));
        }
        self.leaves.push((self.path.clone(), leaf));
        Ok(())
    }

    fn check_unfolded(&self, n: usize) -> Result<()> {
        let most = 4 * self.file.pickle.len() + MORE_LEAVES;
        if n <= most {
            return Ok(());
        }
        let message = format!("containers that are shared unfold into more than {most} values");
        Err(Error::new(Kind::Unsupported, message))
    }

    fn children(&mut self, id: Id, children: Vec<(Cow<'_, str>, Id)>) -> Result<()> {
        if children.is_empty() {
            return self.leaf(Leaf::Other(id));
        }
        if self.open.contains(&id) {
            return Err(Error::new(
                Kind::Unsupported,
                format!("`{}` contains itself", Printable(&self.path)),
            ));
        }
        if self.open.len() >= MAX_DEPTH {
            return Err(Error::new(
                Kind::Unsupported,
                format!("values are nested deeper than {MAX_DEPTH}"),
            ));
        }
        self.open.push(id);
        for (name, child) in children {
            let n = self.path.len();
            if self.open.len() > 1 {
                self.path.push('.');
            }
            self.path.push_str(&name);
            self.visit(child)?;
            self.path.truncate(n);
        }
        self.open.pop();
        Ok(())
    }
}

/// A key of a dict as a part of a path: borrowed if and only if it is text.
fn key_text(pickle: &Pickle, id: Id) -> Result<Cow<'_, str>> {
    // Keys can share their text: each is copied.
    let is_long = |text: &str| text.len() > MAX_PATH_BYTES;
    Ok(match pickle.get(id) {
        Value::Text(text) if is_long(text) => return Err(long_key()),
        Value::Global(module, name) if is_long(module) || is_long(name) => return Err(long_key()),
        Value::Tuple(items) if items.len() > MAX_KEY_ITEMS => return Err(long_key()),
        Value::Text(text) => Cow::Borrowed(text),
        Value::Int(int) => int.to_string().into(),
        Value::Bool(true) => "True".to_owned().into(),
        Value::Bool(false) => "False".to_owned().into(),
        Value::None => "None".to_owned().into(),
        Value::Global(module, name) => format!("{module}.{name}").into(),
        Value::Tuple(items) => {
            let parts = items.iter().map(|item| match pickle.get(*item) {
                Value::Tuple(_) => Err(unsupported_key()),
                _ => key_text(pickle, *item),
            });
            format!("({})", parts.collect::<Result<Vec<_>>>()?.join(", ")).into()
        }
        _ => return Err(unsupported_key()),
    })
}

/// The types of a key, or of the items of a tuple, which tell keys with the same text apart.
fn key_kinds(pickle: &Pickle, id: Id) -> Vec<Discriminant<Value<'_>>> {
    let own = [id];
    let items = match pickle.get(id) {
        Value::Tuple(items) => items,
        _ => own.as_slice(),
    };
    items
        .iter()
        .map(|item| discriminant(&pickle.get(*item)))
        .collect()
}

fn long_key() -> Error {
    let message = format!(
        "a key of a dict has more than {MAX_PATH_BYTES} bytes, or more than {MAX_KEY_ITEMS} items"
    );
    Error::new(Kind::Unsupported, message)
}

fn unsupported_key() -> Error {
    Error::new(
        Kind::Unsupported,
        "a dict has a key that is neither text nor a number",
    )
}

/// The members of an archive of `torch.save`.
struct Archive<'a> {
    pickle: Cow<'a, [u8]>,
    storages: Vec<Storage>,
}

/// What a file of the newer form consists of.
fn unpacked(window: Window<'_>) -> Result<Archive<'_>> {
    let members = zip::members(window)?;
    let mut pickles = members.iter().filter(|one| one.name.ends_with("/data.pkl"));
    let main = pickles.next().ok_or_else(|| {
        Error::damaged("the archive has no `data.pkl`: it is no file of `torch.save`")
    })?;
    if pickles.next().is_some() {
        return Err(Error::damaged("the archive has two `data.pkl`"));
    }
    let base = &main.name[..main.name.len() - "data.pkl".len()];
    let find = |name: &str| {
        members
            .iter()
            .find(|one| one.name.strip_prefix(base) == Some(name))
    };
    if find("constants.pkl").is_some() {
        return Err(Error::new(
            Kind::Unsupported,
            "it is a TorchScript archive, not a checkpoint",
        ));
    }
    if let Some(member) = find("byteorder") {
        match &*content(window, member, 16)? {
            b"little" => {}
            b"big" => return Err(big_endian()),
            _ => return Err(Error::damaged("`byteorder` is neither little nor big")),
        }
    }
    for name in ["version", ".data/version"] {
        if let Some(member) = find(name) {
            let text = content(window, member, 32)?;
            let version = std::str::from_utf8(&text)
                .ok()
                .and_then(|text| text.trim().parse::<u64>().ok());
            let version = version.ok_or_else(|| Error::damaged("`version` is no number"))?;
            if version > MAX_VERSION {
                let message = format!(
                    "version {version} of the archive, known are those up to {MAX_VERSION}"
                );
                return Err(Error::new(Kind::Unsupported, message));
            }
        }
    }
    let bytes = content(window, main, MAX_PICKLE_BYTES)?;
    if main.crc != 0 && crc32(&bytes) != main.crc {
        return Err(Error::damaged("`data.pkl` differs from its CRC-32"));
    }
    let storages = members.iter().filter_map(|member| {
        let key = member.name.strip_prefix(base)?.strip_prefix("data/")?;
        Some(Storage {
            key: key.to_owned(),
            start: member.start,
            n_bytes: member.n_bytes,
            crc: (member.crc != 0).then_some(member.crc),
        })
    });
    Ok(Archive {
        pickle: bytes,
        storages: storages.collect(),
    })
}

fn content<'a>(window: Window<'a>, member: &Member, max_bytes: u64) -> Result<Cow<'a, [u8]>> {
    if member.n_bytes > max_bytes {
        let message = format!(
            "member `{}` has {} bytes, at most {max_bytes} are read",
            Printable(&member.name),
            member.n_bytes
        );
        return Err(Error::new(Kind::Unsupported, message));
    }
    window.read(member.start - window.start(), member.n_bytes)
}

/// The dtype of a storage class; `None` for an untyped storage, which counts bytes.
fn storage_class(pickle: &Pickle, id: Id) -> Result<Option<Dtype>> {
    let (module, name) = pickle
        .name(id)
        .ok_or_else(|| Error::damaged("the type of a storage is no name"))?;
    let dtype = match (module, name) {
        ("torch.storage", "UntypedStorage" | "_UntypedStorage") | ("torch", "UntypedStorage") => {
            return Ok(None);
        }
        ("torch", "DoubleStorage") => Dtype::F64,
        ("torch", "FloatStorage") => Dtype::F32,
        ("torch", "HalfStorage") => Dtype::F16,
        ("torch", "BFloat16Storage") => Dtype::Bf16,
        ("torch", "LongStorage") => Dtype::I64,
        ("torch", "IntStorage") => Dtype::I32,
        ("torch", "ShortStorage") => Dtype::I16,
        ("torch", "CharStorage") => Dtype::I8,
        ("torch", "ByteStorage") => Dtype::U8,
        ("torch", "BoolStorage") => Dtype::Bool,
        ("torch", "ComplexFloatStorage") => Dtype::C64,
        _ => {
            let message = format!(
                "a storage of the type `{}.{}`, which is not supported",
                Printable(module),
                Printable(name)
            );
            return Err(Error::new(Kind::Unsupported, message));
        }
    };
    Ok(Some(dtype))
}

/// The dtype of a `torch.<dtype>`.
pub fn named_dtype(pickle: &Pickle, id: Id) -> Result<Dtype> {
    let Some(("torch", name)) = pickle.name(id) else {
        return Err(Error::damaged("a dtype that is no name of torch"));
    };
    Ok(match name {
        "float64" | "double" => Dtype::F64,
        "float32" | "float" => Dtype::F32,
        "float16" | "half" => Dtype::F16,
        "bfloat16" => Dtype::Bf16,
        "int64" | "long" => Dtype::I64,
        "int32" | "int" => Dtype::I32,
        "int16" | "short" => Dtype::I16,
        "int8" => Dtype::I8,
        "uint8" => Dtype::U8,
        "uint16" => Dtype::U16,
        "uint32" => Dtype::U32,
        "uint64" => Dtype::U64,
        "bool" => Dtype::Bool,
        "complex64" => Dtype::C64,
        "float8_e4m3fn" => Dtype::F8E4M3,
        "float8_e5m2" => Dtype::F8E5M2,
        "float8_e4m3fnuz" => Dtype::F8E4M3Fnuz,
        "float8_e5m2fnuz" => Dtype::F8E5M2Fnuz,
        "float8_e8m0fnu" => Dtype::F8E8M0,
        _ => {
            return Err(Error::new(
                Kind::Unsupported,
                format!("a tensor of the dtype `torch.{}`", Printable(name)),
            ));
        }
    })
}

/// Bytes of an element of each storage of a legacy file, which only the object says.
fn legacy_item_bytes(pickle: &Pickle) -> Result<HashMap<String, u64>> {
    let mut sizes = HashMap::new();
    for value in pickle.values() {
        let Value::Persistent(id) = value else {
            continue;
        };
        let Some(parts) = pickle.sequence(id) else {
            continue;
        };
        if let [_, class, key, ..] = *parts
            && let Some(key) = pickle.text(key)
        {
            let item = storage_class(pickle, class)?.map_or(1, |dtype| dtype.unit().1);
            if sizes
                .insert(key.to_owned(), item)
                .is_some_and(|before| before != item)
            {
                return Err(Error::damaged(format!(
                    "storage `{}` has two types",
                    Printable(key)
                )));
            }
        }
    }
    Ok(sizes)
}

/// The pickles at the beginning of a legacy file.
struct Legacy<'a> {
    window: Window<'a>,
    at: u64,
    ahead: u64,
}

impl Legacy<'_> {
    fn pickle(&mut self) -> Result<Pickle> {
        loop {
            let left = self.window.n_bytes() - self.at;
            let bytes = self.window.read(self.at, left.min(self.ahead))?;
            match Pickle::decode(&bytes) {
                Ok(pickle) => {
                    self.at += pickle.n_bytes() as u64;
                    return Ok(pickle);
                }
                // Its length is not known before it is decoded.
                Err(_) if self.ahead < left && self.ahead < MAX_PICKLE_BYTES => self.ahead *= 8,
                Err(error) => return Err(error),
            }
        }
    }
}

fn is_zip(window: Window<'_>) -> Result<bool> {
    let head = window.read(0, window.n_bytes().min(4))?;
    Ok(*head == *b"PK\x03\x04")
}

fn is_legacy_head(head: &[u8]) -> bool {
    head.len() >= 14
        && head[0] == 0x80
        && head[2] == 0x8a
        && usize::from(head[3]) == MAGIC.len()
        && head[4..14] == MAGIC
}

fn big_endian() -> Error {
    Error::new(Kind::Unsupported, "its tensors are big-endian")
        .hint("load and save it again with torch on that machine")
}

/// The CRC-32 of zip archives.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes) as u32
}
