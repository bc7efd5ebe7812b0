//! Files of `torch.save` and of `torch.distributed.checkpoint`: their tensors as entries of an index, their other values as
//! Python objects. No class of a file is imported: what is no plain value becomes an `Opaque`.

use crate::errors::raise;
use crate::index::{Index, parse_method};
use pyo3::exceptions::PyRecursionError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyComplex, PyDict, PyFrozenSet, PyList, PyTuple};
use reshard_core::error::Printable;
use reshard_core::source::Source;
use reshard_core::{Error, Kind};
use reshard_formats::compressed::{decompressed, is_zstd};
use reshard_formats::dcp::{Dcp, Step, index_of, paths};
use reshard_formats::pickle::{Id, Pickle, Record, Value};
use reshard_formats::torch_file::{Leaf, TorchFile};
use reshard_formats::zip::Window;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Nesting of values.
const MAX_DEPTH: usize = 100;
/// Python objects of one value: shared containers are made once, so a value has as many as its pickle.
const MAX_OBJECTS: usize = 50_000_000;
/// Elements of the nested tuples of one key. The hash of a tuple visits them all, also those of shared tuples again.
const MAX_KEY_PARTS: usize = 100;
/// An item that is no tensor, unpacked.
const MAX_OBJECT_BYTES: u64 = 4 << 30;

/// An object whose class is not known here: its name and what it was to be made of.
#[pyclass(module = "reshard._core", frozen, get_all)]
pub(crate) struct Opaque {
    /// Module and name of the class or function.
    name: String,
    /// The arguments of the call, a tuple; `None` if only the name is stored.
    arguments: Py<PyAny>,
    /// What was to become its attributes, or `None`.
    state: Py<PyAny>,
    /// Keys and values that were to be set.
    items: Py<PyAny>,
    /// Values that were to be appended.
    appended: Py<PyAny>,
}

#[pymethods]
impl Opaque {
    fn __repr__(&self) -> String {
        format!("<opaque {}>", self.name)
    }
}

struct Converter<'a, 'py> {
    py: Python<'py>,
    pickle: &'a Pickle,
    /// Objects that were made, so that what is shared stays shared.
    made: HashMap<Id, Py<PyAny>>,
    depth: usize,
    /// The file, if its tensors are left out.
    without_tensors: Option<&'a TorchFile>,
    /// What stands for them, by the name of the function that makes them.
    tensors: HashMap<String, Py<PyAny>>,
}

impl<'py> Converter<'_, 'py> {
    fn object(&mut self, id: Id) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        if let Some(made) = self.made.get(&id) {
            return Ok(made.bind(py).clone());
        }
        if self.depth >= MAX_DEPTH || self.made.len() >= MAX_OBJECTS {
            return Err(PyRecursionError::new_err("too deep or too many values"));
        }
        self.depth += 1;
        let object = self.make(id);
        self.depth -= 1;
        let object = object?;
        if !matches!(
            self.pickle.get(id),
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_)
        ) {
            self.made.insert(id, object.clone().unbind());
        }
        Ok(object)
    }

    fn make(&mut self, id: Id) -> PyResult<Bound<'py, PyAny>> {
        let (py, pickle) = (self.py, self.pickle);
        Ok(match pickle.get(id) {
            Value::None => py.None().into_bound(py),
            Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
            Value::Int(value) => value.into_pyobject(py)?.into_any(),
            Value::Long(bytes) => {
                let options = PyDict::new(py);
                options.set_item("signed", true)?;
                let int = py.import("builtins")?.getattr("int")?;
                int.call_method(
                    "from_bytes",
                    (PyBytes::new(py, bytes), "little"),
                    Some(&options),
                )?
            }
            Value::Float(value) => value.into_pyobject(py)?.into_any(),
            Value::Text(text) => text.into_pyobject(py)?.into_any(),
            Value::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
            Value::Tuple(items) => {
                let items = self.objects(items)?;
                PyTuple::new(py, items)?.into_any()
            }
            Value::List(items) => {
                // Made first: a list can contain itself.
                let list = PyList::empty(py);
                self.made.insert(id, list.clone().into_any().unbind());
                for item in items {
                    list.append(self.object(*item)?)?;
                }
                list.into_any()
            }
            Value::Set(items) => {
                let items = self.keys(items)?;
                py.import("builtins")?
                    .getattr("set")?
                    .call1((PyList::new(py, items)?,))?
            }
            Value::Dict(items) => self.dict(id, items)?,
            Value::Global(module, name) => self.opaque(&format!("{module}.{name}"), None)?,
            Value::Persistent(_) => self.opaque("torch.storage", None)?,
            Value::Record(record) => {
                let (module, name) = pickle.name(record.function).unwrap_or(("", ""));
                if self.is_tensor(id) {
                    return self.tensor(&format!("{module}.{name}"));
                }
                let arguments = pickle.sequence(record.arguments).unwrap_or_default();
                if let Some(value) = self.known(id, (module, name), arguments)? {
                    return Ok(value);
                }
                self.opaque(&format!("{module}.{name}"), Some(record))?
            }
        })
    }

    /// Whether the tensors of the file are left out, and this is one.
    fn is_tensor(&self, id: Id) -> bool {
        self.without_tensors
            .is_some_and(|file| matches!(file.tensor(id), Ok(Some(_))))
    }

    /// What stands for all tensors that are made by a function.
    fn tensor(&mut self, name: &str) -> PyResult<Bound<'py, PyAny>> {
        if let Some(made) = self.tensors.get(name) {
            return Ok(made.bind(self.py).clone());
        }
        let made = self.opaque(name, None)?;
        self.tensors.insert(name.to_owned(), made.clone().unbind());
        Ok(made)
    }

    /// The values that plain Python has a type for.
    fn known(
        &mut self,
        id: Id,
        name: (&str, &str),
        arguments: &[Id],
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (py, pickle) = (self.py, self.pickle);
        Ok(match (name, arguments) {
            (("collections", "OrderedDict" | "defaultdict" | "Counter"), _) => {
                match pickle.items(id) {
                    Some(items) => Some(self.dict(id, items)?),
                    None => None,
                }
            }
            (("builtins" | "__builtin__", "set"), [items]) => match pickle.sequence(*items) {
                Some(items) => {
                    let items = self.keys(items)?;
                    Some(
                        py.import("builtins")?
                            .getattr("set")?
                            .call1((PyList::new(py, items)?,))?,
                    )
                }
                None => None,
            },
            (("builtins" | "__builtin__", "frozenset"), [items]) => match pickle.sequence(*items) {
                Some(items) => Some(PyFrozenSet::new(py, self.keys(items)?)?.into_any()),
                None => None,
            },
            (("builtins" | "__builtin__", "complex"), [real, imaginary]) => {
                match (pickle.get(*real), pickle.get(*imaginary)) {
                    (Value::Float(real), Value::Float(imaginary)) => {
                        Some(PyComplex::from_doubles(py, real, imaginary).into_any())
                    }
                    _ => None,
                }
            }
            // Bytes in protocol 2: text of which each character is a byte.
            (("_codecs", "encode"), [text, codec]) if pickle.text(*codec) == Some("latin1") => {
                let text = pickle.text(*text).unwrap_or_default();
                let bytes: Option<Vec<u8>> = text
                    .chars()
                    .map(|c| u8::try_from(u32::from(c)).ok())
                    .collect();
                bytes.map(|bytes| PyBytes::new(py, &bytes).into_any())
            }
            (("numpy._core.multiarray" | "numpy.core.multiarray", "scalar"), [dtype, data]) => {
                match (
                    self.numpy_dtype(*dtype),
                    self.object(*data)?.cast::<PyBytes>(),
                ) {
                    (Some(dtype), Ok(data)) => self
                        .numpy_array(&dtype, data, None)?
                        .map(|array| array.get_item(0))
                        .transpose()?,
                    _ => None,
                }
            }
            (("numpy._core.multiarray" | "numpy.core.multiarray", "_reconstruct"), _) => {
                // (version, shape, dtype, whether it is in Fortran order, bytes)
                let state = pickle
                    .record(id)
                    .and_then(|record| pickle.sequence(record.state?));
                let Some(&[_, shape, dtype, fortran, data]) = state else {
                    return Ok(None);
                };
                let order = match pickle.get(fortran) {
                    Value::Bool(true) => "F",
                    _ => "C",
                };
                match (
                    self.numpy_dtype(dtype),
                    self.object(data)?.cast::<PyBytes>(),
                ) {
                    (Some(dtype), Ok(data)) => {
                        let shape = self.object(shape)?;
                        self.numpy_array(&dtype, data, Some((shape, order)))?
                    }
                    _ => None,
                }
            }
            (("builtins" | "__builtin__", "bytes"), []) => Some(PyBytes::new(py, b"").into_any()),
            _ => None,
        })
    }

    /// A plain numeric dtype of numpy, little-endian: `dtype('f8', False, True)` with its byte order as state.
    fn numpy_dtype(&self, id: Id) -> Option<String> {
        let record = self.pickle.call(id, "numpy", "dtype")?;
        let code = self
            .pickle
            .text(*self.pickle.sequence(record.arguments)?.first()?)?;
        let order = self
            .pickle
            .text(*self.pickle.sequence(record.state?)?.get(1)?)?;
        let is_plain = matches!(
            code,
            "b1" | "i1"
                | "i2"
                | "i4"
                | "i8"
                | "u1"
                | "u2"
                | "u4"
                | "u8"
                | "f2"
                | "f4"
                | "f8"
                | "c8"
                | "c16"
        );
        (is_plain && matches!(order, "<" | "|" | "=")).then(|| format!("<{code}"))
    }

    /// An array over a copy of some bytes; `None` if they are not as many as the shape asks for.
    fn numpy_array(
        &self,
        dtype: &str,
        data: &Bound<'py, PyBytes>,
        shape: Option<(Bound<'py, PyAny>, &str)>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let numpy = self.py.import("numpy")?;
        let made = || {
            let array = numpy
                .call_method1("frombuffer", (data, dtype))?
                .call_method0("copy")?;
            let Some((shape, order)) = shape else {
                return Ok(array);
            };
            let options = PyDict::new(self.py);
            options.set_item("order", order)?;
            array.call_method("reshape", (shape,), Some(&options))
        };
        match made() {
            Ok(array) => Ok(Some(array)),
            Err(error) if error.is_instance_of::<pyo3::exceptions::PyValueError>(self.py) => {
                Ok(None)
            }
            Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(self.py) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn objects(&mut self, ids: &[Id]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        ids.iter().map(|id| self.object(*id)).collect()
    }

    fn keys(&mut self, ids: &[Id]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        ids.iter().map(|id| self.key(*id)).collect()
    }

    /// A key of a dict, or an element of a set.
    fn key(&mut self, id: Id) -> PyResult<Bound<'py, PyAny>> {
        let key = self.object(id)?;
        if !key.is_instance_of::<PyTuple>() {
            return Ok(key);
        }
        let mut n_parts = 0;
        let mut pending = vec![key.clone()];
        while let Some(part) = pending.pop() {
            n_parts += 1;
            if let Ok(tuple) = part.cast::<PyTuple>() {
                n_parts += tuple.len();
                if n_parts > MAX_KEY_PARTS {
                    return Err(PyRecursionError::new_err("a key of too many parts"));
                }
                pending.extend(tuple.iter());
            }
        }
        Ok(key)
    }

    fn dict(&mut self, id: Id, items: &[[Id; 2]]) -> PyResult<Bound<'py, PyAny>> {
        let dict = PyDict::new(self.py);
        self.made.insert(id, dict.clone().into_any().unbind());
        for [key, value] in items {
            let key = self.key(*key)?;
            dict.set_item(key, self.object(*value)?)?;
        }
        Ok(dict.into_any())
    }

    fn opaque(&mut self, name: &str, record: Option<Record<'_>>) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        let none = || py.None();
        let opaque = match record {
            None => Opaque {
                name: name.to_owned(),
                arguments: none(),
                state: none(),
                items: none(),
                appended: none(),
            },
            Some(record) => {
                let items = record
                    .items
                    .iter()
                    .map(|[key, value]| Ok((self.object(*key)?, self.object(*value)?)));
                let items = items.collect::<PyResult<Vec<_>>>()?;
                Opaque {
                    name: name.to_owned(),
                    arguments: self.object(record.arguments)?.unbind(),
                    state: record.state.map_or_else(
                        || Ok(none()),
                        |state| self.object(state).map(Bound::unbind),
                    )?,
                    items: PyList::new(py, items)?.into_any().unbind(),
                    appended: PyList::new(py, self.objects(record.appended)?)?
                        .into_any()
                        .unbind(),
                }
            }
        };
        Ok(Bound::new(py, opaque)?.into_any())
    }
}

fn converted<'py>(
    py: Python<'py>,
    pickle: &Pickle,
    ids: impl Iterator<Item = Id>,
    without_tensors: Option<&TorchFile>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let mut converter = Converter {
        py,
        pickle,
        without_tensors,
        tensors: HashMap::new(),
        made: HashMap::new(),
        depth: 0,
    };
    let objects = ids
        .map(|id| converter.object(id))
        .collect::<PyResult<Vec<_>>>();
    objects.or_else(|error| {
        if error.is_instance_of::<PyRecursionError>(py) {
            return raise(
                py,
                Err(Error::new(
                    Kind::Unsupported,
                    "its values are nested too deep, or too many",
                )),
            );
        }
        if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) {
            return raise(
                py,
                Err(Error::damaged("a value that cannot be a key is one")),
            );
        }
        Err(error)
    })
}

type TensorTuple<'py> = (String, &'static str, Bound<'py, PyTuple>);

fn read_leaves(
    py: Python<'_>,
    path: &Path,
    follow_links: bool,
) -> PyResult<(TorchFile, Vec<(String, Leaf)>)> {
    let read = py.detach(|| {
        let source = Source::open(path, follow_links, reshard_core::source::Method::Read)?;
        let file = TorchFile::read(Window::whole(&source))?;
        let leaves = file.leaves()?;
        Ok((file, leaves))
    });
    raise(
        py,
        read.map_err(|error: Error| error.within(path.display()).path(path)),
    )
}

/// Tensors and other values of a file of `torch.save`, by path.
#[pyfunction]
#[pyo3(signature = (path, *, follow_links=true))]
pub(crate) fn read_torch_file(
    py: Python<'_>,
    path: PathBuf,
    follow_links: bool,
) -> PyResult<(Vec<TensorTuple<'_>>, Vec<(String, Bound<'_, PyAny>)>)> {
    let (file, leaves) = read_leaves(py, &path, follow_links)?;
    let mut tensors = Vec::new();
    let (mut names, mut ids) = (Vec::new(), Vec::new());
    for (name, leaf) in leaves {
        match leaf {
            Leaf::Tensor(tensor) => {
                tensors.push((name, tensor.dtype.name(), PyTuple::new(py, tensor.shape)?));
            }
            Leaf::Sharded(_) => return raise(py, Err(no_whole(&path, &name))),
            Leaf::Other(id) => {
                names.push(name);
                ids.push(id);
            }
        }
    }
    let objects = converted(py, file.pickle(), ids.into_iter(), None)?;
    Ok((tensors, names.into_iter().zip(objects).collect()))
}

fn no_whole(path: &Path, name: &str) -> Error {
    let message = "it holds a DTensor, the shard of one rank";
    Error::new(Kind::Unsupported, message)
        .within(format_args!("`{}`", Printable(name)))
        .within(path.display())
        .path(path)
        .key(name)
}

type ShardTuple<'py> = (
    String,
    &'static str,
    Bound<'py, PyTuple>,
    Bound<'py, PyTuple>,
    Bound<'py, PyAny>,
);
type RankTuples<'py> = (
    Vec<TensorTuple<'py>>,
    Vec<ShardTuple<'py>>,
    Vec<(String, Bound<'py, PyAny>)>,
);

/// Tensors, shards of tensors and other values of a file of `torch.save`, by path.
#[pyfunction]
#[pyo3(signature = (path, *, follow_links=true))]
pub(crate) fn read_torch_shards(
    py: Python<'_>,
    path: PathBuf,
    follow_links: bool,
) -> PyResult<RankTuples<'_>> {
    let (file, leaves) = read_leaves(py, &path, follow_links)?;
    let (mut tensors, mut shards) = (Vec::new(), Vec::new());
    let (mut names, mut ids) = (Vec::new(), Vec::new());
    for (name, leaf) in leaves {
        match leaf {
            Leaf::Tensor(tensor) => {
                tensors.push((name, tensor.dtype.name(), PyTuple::new(py, tensor.shape)?));
            }
            Leaf::Sharded(sharded) => {
                ids.push(sharded.spec);
                shards.push((name, sharded.local, sharded.shape));
            }
            Leaf::Other(id) => {
                names.push((ids.len(), name));
                ids.push(id);
            }
        }
    }
    let objects = converted(py, file.pickle(), ids.into_iter(), None)?;
    let mut others = Vec::with_capacity(names.len());
    let specs = objects.into_iter().enumerate();
    let mut next_names = names.into_iter().peekable();
    let mut sharded = Vec::with_capacity(shards.len());
    let mut next_shards = shards.into_iter();
    for (number, object) in specs {
        if let Some((_, name)) = next_names.next_if(|(of, _)| *of == number) {
            others.push((name, object));
        } else if let Some((name, local, shape)) = next_shards.next() {
            let dtype = local.dtype.name();
            let (local, whole) = (PyTuple::new(py, local.shape)?, PyTuple::new(py, shape)?);
            sharded.push((name, dtype, local, whole, object));
        }
    }
    Ok((tensors, sharded, others))
}

/// Tensors of a file of `torch.save` by path, and its object, in which one value stands for all tensors.
#[pyfunction]
#[pyo3(signature = (path, *, follow_links=true))]
pub(crate) fn read_torch_content(
    py: Python<'_>,
    path: PathBuf,
    follow_links: bool,
) -> PyResult<(Vec<TensorTuple<'_>>, Bound<'_, PyAny>)> {
    let (file, leaves) = read_leaves(py, &path, follow_links)?;
    let mut tensors = Vec::new();
    for (name, leaf) in leaves {
        match leaf {
            Leaf::Tensor(tensor) => {
                tensors.push((name, tensor.dtype.name(), PyTuple::new(py, tensor.shape)?));
            }
            Leaf::Sharded(_) => return raise(py, Err(no_whole(&path, &name))),
            Leaf::Other(_) => {}
        }
    }
    let root = std::iter::once(file.pickle().root());
    let mut objects = converted(py, file.pickle(), root, Some(&file))?;
    Ok((tensors, objects.remove(0)))
}

/// The object of `torch.save` in a range of a file.
#[pyfunction]
#[pyo3(signature = (path, start, n_bytes, *, transforms=vec![]))]
pub(crate) fn read_torch_object(
    py: Python<'_>,
    path: PathBuf,
    start: u64,
    n_bytes: u64,
    transforms: Vec<String>,
) -> PyResult<Bound<'_, PyAny>> {
    let read = py.detach(|| {
        let source = Source::open(&path, false, reshard_core::source::Method::Read)?;
        if transforms.is_empty() {
            return TorchFile::read(Window::new(&source, start, n_bytes)?);
        }
        if !is_zstd(&transforms) {
            return Err(Error::new(
                Kind::Unsupported,
                "it is transformed in a way that is not known",
            ));
        }
        let source = decompressed(source, start, n_bytes, MAX_OBJECT_BYTES)?;
        TorchFile::read(Window::whole(&source))
    });
    let file = raise(
        py,
        read.map_err(|error| error.within(path.display()).path(&path)),
    )?;
    let mut objects = converted(
        py,
        file.pickle(),
        std::iter::once(file.pickle().root()),
        None,
    )?;
    Ok(objects.remove(0))
}

/// The object of `torch.save` in bytes.
#[pyfunction]
pub(crate) fn decode_torch_object<'py>(
    py: Python<'py>,
    data: Bound<'py, PyBytes>,
) -> PyResult<Bound<'py, PyAny>> {
    let source = Source::of_bytes(
        PathBuf::from("an object of torch.save"),
        data.as_bytes().to_vec(),
    );
    let file = raise(py, TorchFile::read(Window::whole(&source)))?;
    let mut objects = converted(
        py,
        file.pickle(),
        std::iter::once(file.pickle().root()),
        None,
    )?;
    Ok(objects.remove(0))
}

/// `name, path, start, n_bytes, transforms`
type ObjectTuple = (String, String, u64, u64, Vec<String>);
type OpenedDcp = (
    Index,
    Vec<ObjectTuple>,
    Vec<(String, String)>,
    Vec<(String, u64)>,
);

/// The index of a folder of `torch.distributed.checkpoint`, and what its `.metadata` says beside the tensors.
#[pyfunction]
#[pyo3(signature = (folder, data, *, method="auto"))]
pub(crate) fn open_dcp(
    py: Python<'_>,
    folder: PathBuf,
    data: &[u8],
    method: &str,
) -> PyResult<OpenedDcp> {
    opened_dcp(py, &folder, method, || {
        let path = folder.join(".metadata");
        Dcp::decode(data).map_err(|error| error.within(path.display()).path(&path))
    })
}

/// The same for a folder with a description of each rank, given as `(name, content)`.
#[pyfunction]
#[pyo3(signature = (folder, descriptions, *, method="auto"))]
pub(crate) fn open_dcp_ranks(
    py: Python<'_>,
    folder: PathBuf,
    descriptions: Vec<(String, Vec<u8>)>,
    method: &str,
) -> PyResult<OpenedDcp> {
    opened_dcp(py, &folder, method, || {
        let mut parts = Vec::with_capacity(descriptions.len());
        for (name, data) in &descriptions {
            let path = folder.join(name);
            let part = Dcp::decode(data);
            parts.push(part.map_err(|error| error.within(path.display()).path(&path))?);
        }
        Dcp::merged(parts).map_err(|error| error.within(folder.display()).path(&folder))
    })
}

fn opened_dcp(
    py: Python<'_>,
    folder: &std::path::Path,
    method: &str,
    decode: impl FnOnce() -> reshard_core::Result<Dcp> + Send,
) -> PyResult<OpenedDcp> {
    let method = raise(py, parse_method(method))?;
    let opened = py.detach(|| {
        let dcp = Arc::new(decode()?);
        let index = index_of(&dcp, folder, method)
            .map_err(|error| error.within(folder.display()).path(folder))?;
        Ok((dcp, index))
    });
    let (dcp, index) = raise(py, opened)?;
    let objects = dcp.objects.iter().map(|(name, place)| {
        let file = dcp.files[place.file as usize].clone();
        let transforms = dcp.transforms[place.transforms as usize].clone();
        (name.clone(), file, place.offset, place.n_bytes, transforms)
    });
    let objects = objects.collect();
    let unsupported = dcp.tensors.iter();
    let unsupported =
        unsupported.filter_map(|tensor| Some((tensor.name.clone(), tensor.dtype.clone().err()?)));
    let files = dcp.files.iter().cloned().zip(dcp.ends());
    Ok((
        Index::of(index),
        objects,
        unsupported.collect(),
        files.collect(),
    ))
}

/// The path of each flattened name that a `.metadata` has: keys and positions.
#[pyfunction]
pub(crate) fn read_dcp_paths<'py>(
    py: Python<'py>,
    data: &[u8],
) -> PyResult<Vec<(String, Bound<'py, PyTuple>)>> {
    let found = py.detach(|| paths(data));
    let found = raise(py, found)?.into_iter().map(|(name, steps)| {
        let steps = steps.into_iter().map(|step| match step {
            Step::Key(key) => Ok(key.into_pyobject(py)?.into_any()),
            Step::Number(number) => Ok(number.into_pyobject(py)?.into_any()),
        });
        Ok((
            name,
            PyTuple::new(py, steps.collect::<PyResult<Vec<_>>>()?)?,
        ))
    });
    found.collect()
}
