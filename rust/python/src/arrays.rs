//! Arrays of the caller: what they have in common, and their memory, as the core writes it.
//!
//! There can be 100,000 of them, and to ask each by the interfaces of Python takes longer than to write 4 KiB. So they
//! are given as columns, and numpy arrays are looked at directly.

use crate::buffer::{ArrayMemory, Borrowed};
use crate::errors::raise;
use crate::values::DtypeName;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyList, PySequence, PyTuple};
use reshard_core::dtype::Dtype;
use reshard_core::plan::{MemoryTensor, Plan as CorePlan};
use reshard_core::{Error, Kind};
use rustc_hash::FxHashMap;
use std::collections::HashMap;

/// The distinct dtypes and shapes of numpy arrays, and the number of each array's; `None` if one is none, or of a
/// subclass.
///
/// Equal dtypes can be several objects, and then occur several times.
#[pyfunction]
pub(crate) fn array_kinds<'py>(
    arrays: &Bound<'py, PyAny>,
) -> PyResult<Option<(Vec<(Bound<'py, PyAny>, Bound<'py, PyTuple>)>, Vec<u32>)>> {
    let mut numbers: HashMap<(usize, Vec<usize>), u32> = HashMap::new();
    let mut kinds = Vec::new();
    let mut kind_of = Vec::with_capacity(arrays.len()?);
    let mut last: Option<(usize, Vec<usize>, u32)> = None;
    for array in arrays.try_iter()? {
        let array = array?;
        let Ok(array) = array.cast_exact::<PyUntypedArray>() else {
            return Ok(None);
        };
        let dtype = array.dtype();
        let (address, shape) = (dtype.as_ptr() as usize, array.shape());
        let number = match &last {
            Some((known, of, number)) if *known == address && of == shape => *number,
            _ => {
                let next = kinds.len() as u32;
                let number = *numbers.entry((address, shape.to_vec())).or_insert(next);
                if number == next {
                    // Holds the dtype, whose address no other can get then.
                    kinds.push((dtype.into_any(), PyTuple::new(array.py(), shape)?));
                }
                last = Some((address, shape.to_vec(), number));
                number
            }
        };
        kind_of.push(number);
    }
    Ok(Some((kinds, kind_of)))
}

/// The items of two columns in another order of their names; `None` if a name is another object than that of the order.
#[pyfunction]
pub(crate) fn reordered<'py>(
    names: &Bound<'py, PyAny>,
    order: &Bound<'py, PyAny>,
    columns: (Bound<'py, PyAny>, Bound<'py, PyAny>),
) -> PyResult<Option<(Bound<'py, PyList>, Bound<'py, PyList>)>> {
    let mut numbers = FxHashMap::default();
    // Held, so that no other object gets the address of one of them.
    let held = names.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    numbers.reserve(held.len());
    for (number, name) in held.iter().enumerate() {
        numbers.insert(name.as_ptr() as usize, number);
    }
    let mut chosen = Vec::with_capacity(order.len()?);
    for name in order.try_iter()? {
        match numbers.get(&(name?.as_ptr() as usize)) {
            Some(number) => chosen.push(*number),
            None => return Ok(None),
        }
    }
    let pick = |column: Bound<'py, PyAny>| {
        let column = column.cast::<PySequence>()?.to_list()?;
        if column.len() != held.len() {
            return Err(PyValueError::new_err(
                "a column has another length than the names",
            ));
        }
        let items = chosen.iter().map(|number| column.get_item(*number));
        PyList::new(names.py(), items.collect::<PyResult<Vec<_>>>()?)
    };
    Ok(Some((pick(columns.0)?, pick(columns.1)?)))
}

/// Arrays by column: names, memory, and the number of the dtype and shape of each.
#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct ArrayColumns {
    names: Py<PyAny>,
    kinds: Vec<InputKind>,
    kind_of: Vec<u32>,
    memory: Py<PyAny>,
}

#[pymethods]
impl ArrayColumns {
    #[new]
    fn new(
        py: Python<'_>,
        names: Bound<'_, PyAny>,
        kinds: Vec<(DtypeName, Vec<u64>)>,
        kind_of: Vec<u32>,
        memory: Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let kinds = kinds
            .into_iter()
            .map(|(dtype, shape)| InputKind::new(dtype.0, shape));
        let kinds: Vec<_> = kinds.collect();
        let lengths = [names.len()?, memory.len()?];
        let is_sound = lengths == [kind_of.len(); 2]
            && kind_of.iter().all(|kind| (*kind as usize) < kinds.len());
        if !is_sound {
            let message =
                "the columns of arrays have different lengths, or name a kind that is not listed";
            return raise(py, Err(Error::new(Kind::Argument, message)));
        }
        Ok(Self {
            names: names.unbind(),
            kinds,
            kind_of,
            memory: memory.unbind(),
        })
    }

    fn __len__(&self) -> usize {
        self.kind_of.len()
    }
}

struct InputTensor {
    name: PyBackedStr,
    kind: u32,
    memory: ArrayMemory,
}

/// What tensors have in common.
#[derive(Clone)]
struct InputKind {
    dtype: Dtype,
    shape: Vec<u64>,
    n_bytes: u64,
}

/// Arrays that are borrowed to be written.
pub(crate) struct InputTensors {
    kinds: Vec<InputKind>,
    tensors: Vec<InputTensor>,
}

impl InputKind {
    fn new(dtype: Dtype, shape: Vec<u64>) -> Self {
        let n_bytes = dtype.n_bytes(&shape).unwrap_or(u64::MAX);
        Self {
            dtype,
            shape,
            n_bytes,
        }
    }

    /// The memory of a numpy array that is row-major and of this kind.
    fn memory_of_numpy(&self, object: &Bound<'_, PyAny>) -> Option<ArrayMemory> {
        let array = object.cast_exact::<PyUntypedArray>().ok()?;
        let (per_unit, _) = self.dtype.unit();
        let extents = array.shape().iter().map(|n| *n as u64);
        if per_unit == 1 && !extents.eq(self.shape.iter().copied()) {
            return None;
        }
        let memory = ArrayMemory::of_numpy(array)?;
        (memory.bytes().len() as u64 == self.n_bytes).then_some(memory)
    }

    /// The memory of any array of this kind.
    fn memory_of(
        &self,
        py: Python<'_>,
        name: &str,
        object: &Bound<'_, PyAny>,
    ) -> PyResult<ArrayMemory> {
        if let Some(memory) = self.memory_of_numpy(object) {
            return Ok(memory);
        }
        let array = object.cast::<PyUntypedArray>();
        if array.is_ok_and(|array| array.dtype().has_object()) {
            // Its buffer has their addresses.
            let message = format!("`{name}` is an array of Python objects");
            return raise(py, Err(Error::new(Kind::Argument, message).key(name)));
        }
        let (per_unit, unit_bytes) = self.dtype.unit();
        // The dims of a dtype of less than a byte are not those of its bytes.
        let buffer = Borrowed::readable(object, unit_bytes, per_unit > 1)?;
        let n_bytes = buffer.range().1 as u64;
        let has_shape = per_unit > 1
            || buffer.strides().is_empty()
            || buffer.shape().eq(self.shape.iter().copied());
        if !has_shape || n_bytes != self.n_bytes {
            let message = format!(
                "`{name}` is {} of shape {:?}, but its buffer has {n_bytes} bytes of shape {:?}",
                self.dtype,
                self.shape,
                buffer.shape().collect::<Vec<_>>()
            );
            return raise(py, Err(Error::new(Kind::Mismatch, message).key(name)));
        }
        Ok(ArrayMemory::Buffer(buffer))
    }
}

impl InputTensors {
    /// Borrows columns, or an iterable of name, dtype, shape and buffer of each array.
    pub(crate) fn new(py: Python<'_>, tensors: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(columns) = tensors.cast_exact::<ArrayColumns>() {
            return Self::of_columns(py, columns.get());
        }
        let mut this = Self {
            kinds: Vec::new(),
            tensors: Vec::new(),
        };
        let mut numbers = HashMap::new();
        for item in tensors.try_iter()? {
            let (name, DtypeName(dtype), shape, object): (
                PyBackedStr,
                DtypeName,
                Vec<u64>,
                Bound<'_, PyAny>,
            ) = item?.extract()?;
            let kind = *numbers
                .entry((dtype, shape))
                .or_insert_with_key(|(dtype, shape)| {
                    this.kinds.push(InputKind::new(*dtype, shape.clone()));
                    this.kinds.len() as u32 - 1
                });
            this.push(py, name, kind, &object)?;
        }
        Ok(this)
    }

    fn of_columns(py: Python<'_>, columns: &ArrayColumns) -> PyResult<Self> {
        let mut this = Self {
            kinds: columns.kinds.clone(),
            tensors: Vec::with_capacity(columns.kind_of.len()),
        };
        let names = columns.names.bind(py).try_iter()?;
        let memory = columns.memory.bind(py).try_iter()?;
        for ((name, object), kind) in names.zip(memory).zip(&columns.kind_of) {
            this.push(py, name?.extract()?, *kind, &object?)?;
        }
        if this.tensors.len() != columns.kind_of.len() {
            let message = "the columns of arrays have become shorter";
            return raise(py, Err(Error::new(Kind::Argument, message)));
        }
        Ok(this)
    }

    fn push(
        &mut self,
        py: Python<'_>,
        name: PyBackedStr,
        kind: u32,
        object: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let memory = self.kinds[kind as usize].memory_of(py, &name, object)?;
        self.tensors.push(InputTensor { name, kind, memory });
        Ok(())
    }

    /// The plan to write them.
    pub(crate) fn plan(&self, py: Python<'_>) -> PyResult<CorePlan<'_>> {
        let tensors = self.tensors.iter().map(|tensor| self.memory_tensor(tensor));
        let plan = py.detach(|| CorePlan::of_memory(tensors));
        raise(py, plan)
    }

    fn memory_tensor<'a>(&'a self, tensor: &'a InputTensor) -> MemoryTensor<'a> {
        let kind = &self.kinds[tensor.kind as usize];
        MemoryTensor {
            name: &tensor.name,
            dtype: kind.dtype,
            shape: &kind.shape,
            bytes: tensor.memory.bytes(),
            strides_bytes: tensor.memory.strides_bytes(),
        }
    }
}
