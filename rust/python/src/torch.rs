//! Files of `torch.save` and of `torch.distributed.checkpoint`: their tensors as entries of an index, their other values as
//! Python objects. No class of a file is imported: what is no plain value becomes an `Opaque`.

use crate::errors::raise;
use crate::index::{Index, parse_method};
use crate::ranks::RankTensors;
use crate::records::{DCP_OBJECT, OPENED_DCP, TORCH_TENSOR};
use crate::run::run;
use pyo3::exceptions::PyRecursionError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyComplex, PyDict, PyFrozenSet, PyList, PyTuple};
use rayon::prelude::*;
use reshard_core::control::Control;
use reshard_core::error::Printable;
use reshard_core::source::Source;
use reshard_core::{Error, Kind};
use reshard_formats::dcp::folder::{self, Folder};
use reshard_formats::dcp::{Step, paths};
use reshard_formats::objects::{Elements, Object, Objects, read_file, read_range, too_many_values};
use reshard_formats::pickle::{Id, Record};
use reshard_formats::rank_tensors::{RankFile, ReadFile};
use reshard_formats::torch_file::equal::{Decoded, Known, Read};
use reshard_formats::torch_file::{Leaf, Tensor, TorchFile, described};
use reshard_formats::zip::Window;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Nesting of values.
const MAX_DEPTH: usize = 100;
/// Python objects of one value: shared containers are made once, so a value has as many as its pickle.
const MAX_OBJECTS: usize = 50_000_000;
/// Files that are read before their values are made.
const MAX_READ: usize = 16;

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
    objects: Objects<'a>,
    /// Objects that were made, so that what is shared stays shared.
    made: HashMap<Id, Py<PyAny>>,
    depth: usize,
    /// What stands for tensors that are left out, by the name of the function that makes them.
    tensors: HashMap<String, Py<PyAny>>,
}

impl<'a, 'py> Converter<'a, 'py> {
    fn object(&mut self, id: Id) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        if let Some(made) = self.made.get(&id) {
            return Ok(made.bind(py).clone());
        }
        if self.depth >= MAX_DEPTH || self.made.len() >= MAX_OBJECTS {
            return raise(py, Err(too_many_values()));
        }
        self.depth += 1;
        let object = self.make(id);
        self.depth -= 1;
        let object = object?;
        if !self.objects.is_small(id) {
            self.made.insert(id, object.clone().unbind());
        }
        Ok(object)
    }

    fn make(&mut self, id: Id) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match self.objects.get(id) {
            Object::None => py.None().into_bound(py),
            Object::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
            Object::Int(value) => value.into_pyobject(py)?.into_any(),
            Object::Long(bytes) => {
                let options = PyDict::new(py);
                options.set_item("signed", true)?;
                let bytes = PyBytes::new(py, bytes);
                builtin(py, "int")?.call_method("from_bytes", (bytes, "little"), Some(&options))?
            }
            Object::Float(value) => value.into_pyobject(py)?.into_any(),
            Object::Complex(real, imaginary) => {
                PyComplex::from_doubles(py, real, imaginary).into_any()
            }
            Object::Text(text) => text.into_pyobject(py)?.into_any(),
            Object::Bytes(bytes) => PyBytes::new(py, &bytes).into_any(),
            Object::Tuple(items) => {
                let items = self.objects(items)?;
                PyTuple::new(py, items)?.into_any()
            }
            Object::List(items) => {
                // Made first: a list can contain itself.
                let list = PyList::empty(py);
                self.made.insert(id, list.clone().into_any().unbind());
                for item in items {
                    list.append(self.object(*item)?)?;
                }
                list.into_any()
            }
            Object::Set(items) => {
                let items = PyList::new(py, self.keys(items)?)?;
                builtin(py, "set")?.call1((items,))?
            }
            Object::FrozenSet(items) => PyFrozenSet::new(py, self.keys(items)?)?.into_any(),
            Object::Dict(items) => self.dict(id, items)?,
            Object::Scalar(elements) => self.elements(&elements)?.get_item(0)?,
            Object::Array {
                elements,
                shape,
                is_fortran,
            } => {
                let options = PyDict::new(py);
                options.set_item("order", if is_fortran { "F" } else { "C" })?;
                let array = self.elements(&elements)?.call_method0("copy")?;
                array.call_method("reshape", (PyTuple::new(py, shape)?,), Some(&options))?
            }
            Object::Tensor(name) => self.tensor(name)?,
            Object::Opaque { name, record } => self.opaque(name, record)?,
        })
    }

    /// What stands for all tensors that are made by a function.
    fn tensor(&mut self, name: String) -> PyResult<Bound<'py, PyAny>> {
        if let Some(made) = self.tensors.get(&name) {
            return Ok(made.bind(self.py).clone());
        }
        let made = self.opaque(name.clone(), None)?;
        self.tensors.insert(name, made.clone().unbind());
        Ok(made)
    }

    /// A flat array of numpy over these bytes.
    fn elements(&self, elements: &Elements<'_>) -> PyResult<Bound<'py, PyAny>> {
        let data = PyBytes::new(self.py, &elements.data);
        let numpy = self.py.import("numpy")?;
        numpy.call_method1("frombuffer", (data, format!("<{}", elements.dtype)))
    }

    fn objects(&mut self, ids: &[Id]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        ids.iter().map(|id| self.object(*id)).collect()
    }

    fn keys(&mut self, ids: &[Id]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        ids.iter().map(|id| self.key(*id)).collect()
    }

    /// A key of a dict, or an element of a set.
    fn key(&mut self, id: Id) -> PyResult<Bound<'py, PyAny>> {
        raise(self.py, self.objects.check_key(id))?;
        self.object(id)
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

    fn opaque(&mut self, name: String, record: Option<Record<'a>>) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        let none = || py.None();
        let opaque = match record {
            None => Opaque {
                name,
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
                    name,
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

fn builtin<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("builtins")?.getattr(name)
}

fn converted<'py>(
    py: Python<'py>,
    objects: Objects<'_>,
    ids: impl Iterator<Item = Id>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let mut converter = Converter {
        py,
        objects,
        tensors: HashMap::new(),
        made: HashMap::new(),
        depth: 0,
    };
    let objects = ids
        .map(|id| converter.object(id))
        .collect::<PyResult<Vec<_>>>();
    objects.or_else(|error| {
        if error.is_instance_of::<PyRecursionError>(py) {
            return raise(py, Err(too_many_values()));
        }
        if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) {
            let message = "a value that cannot be a key is one";
            return raise(py, Err(Error::damaged(message)));
        }
        Err(error)
    })
}

/// The object of a file.
fn root_of<'py>(
    py: Python<'py>,
    file: &TorchFile,
    objects: Objects<'_>,
) -> PyResult<Bound<'py, PyAny>> {
    let root = std::iter::once(file.pickle().root());
    Ok(converted(py, objects, root)?.remove(0))
}

fn torch_tensor<'py>(
    py: Python<'py>,
    name: String,
    tensor: &Tensor,
) -> PyResult<Bound<'py, PyTuple>> {
    let shape = PyTuple::new(py, &tensor.shape)?;
    TORCH_TENSOR.of(py, (name, tensor.dtype.name(), shape))
}

/// Tensors and other values of a file of `torch.save`, by path.
#[pyfunction]
#[pyo3(signature = (path, *, follow_links=true))]
pub(crate) fn read_torch_file(
    py: Python<'_>,
    path: PathBuf,
    follow_links: bool,
) -> PyResult<(Vec<Bound<'_, PyTuple>>, Vec<(String, Bound<'_, PyAny>)>)> {
    let read = py.detach(|| read_file(&path, follow_links));
    let (file, leaves) = raise(py, read)?;
    let mut tensors = Vec::new();
    let (mut names, mut ids) = (Vec::new(), Vec::new());
    for (name, leaf) in leaves {
        match leaf {
            Leaf::Tensor(tensor) => {
                tensors.push(torch_tensor(py, name, &tensor)?);
            }
            Leaf::Sharded(_) => return raise(py, Err(no_whole(&path, &name, "DTensor"))),
            Leaf::Regions(_) => return raise(py, Err(no_whole(&path, &name, "ShardedTensor"))),
            Leaf::Other(id) => {
                names.push(name);
                ids.push(id);
            }
        }
    }
    let objects = converted(py, Objects::new(file.pickle()), ids.into_iter())?;
    Ok((tensors, names.into_iter().zip(objects).collect()))
}

fn no_whole(path: &Path, name: &str, kind: &str) -> Error {
    let message = format!("it holds a {kind}, the shard of one rank");
    Error::new(Kind::Unsupported, message)
        .within(format_args!("`{}`", Printable(name)))
        .within(path.display())
        .path(path)
        .key(name)
}

/// Adds the tensors of a file of `torch.save` that are no shards to an index. Returns its shards and its other values.
#[pyfunction]
pub(crate) fn add_torch_wholes<'py>(
    py: Python<'py>,
    index: &mut Index,
    file: u32,
) -> PyResult<(RankTensors, Vec<(String, Bound<'py, PyAny>)>)> {
    let index = index.core_mut();
    let read = |source: &Source| {
        let (table, decoded, leaves) = described(Window::whole(source), source.n_bytes(), "")?;
        Ok((table, (decoded, leaves)))
    };
    let add = || {
        let (decoded, leaves) = index.open_with(file, read)?;
        let stored = leaves.iter().flat_map(|(name, leaf)| leaf.stored(name));
        let parts: HashSet<String> = stored.map(|(name, _)| name).collect();
        if parts.is_empty() {
            index.add_whole_file(file)?;
        } else {
            let opened = index.open(file)?;
            let names = (0..opened.table().len()).map(|i| opened.table().entry(i).name);
            for name in names.filter(|name| !parts.contains(*name)) {
                index.add_whole(name, file)?;
            }
        }
        let others = leaves.iter().filter_map(|(name, leaf)| match leaf {
            Leaf::Other(id) => Some((name.clone(), *id)),
            _ => None,
        });
        let others: (Vec<String>, Vec<Id>) = others.unzip();
        let path = index.file_path(file)?.to_owned();
        let of_file = RankFile {
            path,
            file,
            rank: 0,
        };
        let tensors = ReadFile::of(&of_file, &decoded, leaves, "", None)?;
        let mut shards = reshard_formats::rank_tensors::RankTensors::default();
        shards.push(of_file, "", tensors)?;
        Ok((decoded, shards, others))
    };
    let (decoded, shards, (names, ids)) = raise(py, py.detach(add))?;
    let objects = converted(py, Objects::new(decoded.pickle()), ids.into_iter())?;
    Ok((
        RankTensors(shards),
        names.into_iter().zip(objects).collect(),
    ))
}

/// Tensors of each file of `torch.save` by path, and its object, in which one value stands for all tensors.
#[pyfunction]
#[pyo3(signature = (paths, *, follow_links=true))]
pub(crate) fn read_torch_contents(
    py: Python<'_>,
    paths: Vec<PathBuf>,
    follow_links: bool,
) -> PyResult<Vec<Bound<'_, PyTuple>>> {
    let (mut known, mut of_known) = (Known::default(), Vec::new());
    let mut contents = Vec::with_capacity(paths.len());
    let mut rest = &paths[..];
    while !rest.is_empty() {
        // The first ones alone: others are often equal to one of them.
        let n = if contents.len() < 2 { 1 } else { MAX_READ };
        let (next, after) = rest.split_at(n.min(rest.len()));
        rest = after;
        let read_one = |path: &PathBuf| known.read(path, follow_links);
        let read = run(py, None, 0, None, &Control::default(), || {
            Ok(next.par_iter().map(read_one).collect::<Vec<_>>())
        })?;
        for (path, one) in next.iter().zip(read) {
            let content = match raise(py, one)? {
                Read::Equal(number) => of_known.get(number).cloned(),
                Read::Decoded(mut decoded) => {
                    let content = torch_content(py, path, &decoded)?;
                    if known.keep(&mut decoded) {
                        of_known.push(content.clone());
                    }
                    Some(content)
                }
            };
            contents.push(content.expect("known files are kept in their order"));
        }
    }
    Ok(contents)
}

fn torch_content<'py>(
    py: Python<'py>,
    path: &Path,
    decoded: &Decoded,
) -> PyResult<Bound<'py, PyTuple>> {
    let tensors = PyList::empty(py);
    for (name, leaf) in &decoded.leaves {
        match leaf {
            Leaf::Tensor(tensor) => tensors.append(torch_tensor(py, name.clone(), tensor)?)?,
            Leaf::Sharded(_) => return raise(py, Err(no_whole(path, name, "DTensor"))),
            Leaf::Regions(_) => return raise(py, Err(no_whole(path, name, "ShardedTensor"))),
            Leaf::Other(_) => {}
        }
    }
    let objects = Objects::without_tensors(&decoded.file);
    PyTuple::new(
        py,
        [tensors.into_any(), root_of(py, &decoded.file, objects)?],
    )
}

/// The object of `torch.save` in a range of a file.
#[pyfunction]
#[pyo3(signature = (path, start, n_bytes, *, transforms=vec![], with_tensors=true))]
pub(crate) fn read_torch_object(
    py: Python<'_>,
    path: PathBuf,
    start: u64,
    n_bytes: u64,
    transforms: Vec<String>,
    with_tensors: bool,
) -> PyResult<Bound<'_, PyAny>> {
    let read = py.detach(|| read_range(&path, (start, n_bytes), &transforms));
    let file = raise(py, read)?;
    let objects = if with_tensors {
        Objects::new(file.pickle())
    } else {
        Objects::without_tensors(&file)
    };
    root_of(py, &file, objects)
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
    root_of(py, &file, Objects::new(file.pickle()))
}

/// The index of a folder of `torch.distributed.checkpoint`, and what its `.metadata` says beside the tensors.
#[pyfunction]
#[pyo3(signature = (folder, data, *, method="auto"))]
pub(crate) fn open_dcp<'py>(
    py: Python<'py>,
    folder: PathBuf,
    data: &[u8],
    method: &str,
) -> PyResult<Bound<'py, PyTuple>> {
    let method = raise(py, parse_method(method))?;
    opened(py, py.detach(|| folder::open(&folder, data, method)))
}

/// The same for a folder with a description of each rank, given as `(name, content)`.
#[pyfunction]
#[pyo3(signature = (folder, descriptions, *, method="auto"))]
pub(crate) fn open_dcp_ranks<'py>(
    py: Python<'py>,
    folder: PathBuf,
    descriptions: Vec<(String, Vec<u8>)>,
    method: &str,
) -> PyResult<Bound<'py, PyTuple>> {
    let method = raise(py, parse_method(method))?;
    let found = py.detach(|| folder::open_ranks(&folder, &descriptions, method));
    opened(py, found)
}

fn opened(py: Python<'_>, folder: reshard_core::Result<Folder>) -> PyResult<Bound<'_, PyTuple>> {
    let folder = raise(py, folder)?;
    let objects = folder.objects.into_iter().map(|one| {
        let values = (one.name, one.file, one.start, one.n_bytes, one.transforms);
        DCP_OBJECT.of(py, values)
    });
    let objects = objects.collect::<PyResult<Vec<_>>>()?;
    let index = Bound::new(py, Index::of(folder.index))?;
    OPENED_DCP.of(py, (index, objects, folder.unsupported, folder.files))
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
