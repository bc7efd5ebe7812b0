//! The mapping of error kinds of the core to the classes of `reshard.errors`.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use reshard_core::{Error, Kind};

/// Converts a result of the core to a Python result.
pub(crate) fn raise<T>(py: Python<'_>, result: reshard_core::Result<T>) -> PyResult<T> {
    result.map_err(|error| to_python(py, &error))
}

/// Passes an exception of a Python function through the core.
pub(crate) fn of_python(error: PyErr) -> Error {
    Error::caused_by(error.to_string(), error)
}

fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    if let Some(cause) = error.cause::<PyErr>() {
        return cause.clone_ref(py);
    }
    let class = match error.kind() {
        Kind::Io => "StorageError",
        Kind::Damaged => "DamagedFileError",
        Kind::NotFound => "CheckpointNotFoundError",
        Kind::Unsupported => "UnsupportedError",
        Kind::Layout => "LayoutError",
        Kind::Coverage => "CoverageError",
        Kind::Key => "KeyNotFoundError",
        Kind::Mismatch => "MismatchError",
        Kind::Argument => "ArgumentError",
        Kind::Cancelled => "ReshardError",
    };
    let make = || -> PyResult<PyErr> {
        let (path, key, hint, errno) = error.facts();
        let facts = PyDict::new(py);
        facts.set_item("path", path)?;
        facts.set_item("key", key)?;
        facts.set_item("hint", hint)?;
        if error.kind() == Kind::Io {
            facts.set_item("errno", errno)?;
        }
        let class = py.import("reshard.errors")?.getattr(class)?;
        Ok(PyErr::from_value(
            class.call((error.message(),), Some(&facts))?,
        ))
    };
    make().unwrap_or_else(|failure| failure)
}
