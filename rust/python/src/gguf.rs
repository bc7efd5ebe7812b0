//! The header of a GGUF file as Python objects.

use crate::errors::raise;
use crate::records::GGUF_TENSOR;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use reshard_core::source::{Method, Source};
use reshard_formats::gguf::{Value, read};
use std::path::PathBuf;

#[pyfunction]
pub(crate) fn read_gguf(
    py: Python<'_>,
    path: PathBuf,
) -> PyResult<(Bound<'_, PyDict>, Vec<Bound<'_, PyTuple>>)> {
    let found = py.detach(|| read(&Source::open(&path, true, Method::Auto)?));
    let found = raise(py, found)?;
    let values = PyDict::new(py);
    for (key, value) in found.values {
        let value = match value {
            Value::Int(value) => value.into_bound_py_any(py)?,
            Value::Float(value) => value.into_bound_py_any(py)?,
            Value::Bool(value) => value.into_bound_py_any(py)?,
            Value::Text(value) => value.into_bound_py_any(py)?,
            Value::Skipped => continue,
        };
        values.set_item(key, value)?;
    }
    let tensors = found.tensors.into_iter().map(|tensor| {
        let of = tensor.of;
        let shape = PyTuple::new(py, tensor.shape)?;
        let values = (tensor.name, of.name, of.id, of.n_values, of.n_bytes, shape);
        GGUF_TENSOR.of(py, values)
    });
    Ok((values, tensors.collect::<PyResult<_>>()?))
}
