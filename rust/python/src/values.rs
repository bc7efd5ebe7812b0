//! Arguments of the core that Python gives by name: they are checked when they are extracted.

use crate::errors::raise;
use pyo3::{Borrowed, prelude::*};
use reshard_core::dtype::Dtype;

/// A dtype, by its safetensors name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DtypeName(pub(crate) Dtype);

impl<'a, 'py> FromPyObject<'a, 'py> for DtypeName {
    type Error = PyErr;

    fn extract(name: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        raise(name.py(), Dtype::parse(name.extract()?)).map(Self)
    }
}

/// The dtype of an argument that may be left out.
pub(crate) fn dtype_of(name: Option<DtypeName>) -> Option<Dtype> {
    name.map(|name| name.0)
}
