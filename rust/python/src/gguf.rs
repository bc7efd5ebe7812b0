//! The header of a GGUF file as Python objects.

use crate::errors::raise;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use reshard_core::source::{Method, Source};
use reshard_formats::gguf::{Value, read};
use std::path::PathBuf;

/// Name, type and its number, values and bytes of a block, shape in elements.
type Tensor = (String, &'static str, u32, u64, u64, Vec<u64>);

#[pyfunction]
pub(crate) fn read_gguf(
    py: Python<'_>,
    path: PathBuf,
) -> PyResult<(Bound<'_, PyDict>, Vec<Tensor>)> {
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
        let shape = tensor.shape;
        (tensor.name, of.name, of.id, of.n_values, of.n_bytes, shape)
    });
    Ok((values, tensors.collect()))
}
