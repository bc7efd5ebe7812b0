//! Patterns over tensor keys.

use crate::errors::raise;
use crate::records::KEY_GROUP;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyTuple;
use reshard_core::{numbered, patterns};

#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Expression(patterns::Expression);

#[pymethods]
impl Expression {
    #[new]
    #[pyo3(signature = (text, *, whole=true))]
    fn new(py: Python<'_>, text: &str, whole: bool) -> PyResult<Self> {
        let compiled = if whole {
            patterns::Expression::new(text)
        } else {
            patterns::Expression::anywhere(text)
        };
        raise(py, compiled).map(Self)
    }

    fn matches(&self, text: &str) -> bool {
        self.0.matches(text)
    }

    fn groups<'t>(&self, text: &'t str) -> Option<Vec<Option<&'t str>>> {
        self.0.groups(text)
    }
}

#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Patterns(patterns::Patterns);

#[pymethods]
impl Patterns {
    #[new]
    fn new(py: Python<'_>, texts: Vec<PyBackedStr>) -> PyResult<Self> {
        raise(py, py.detach(|| patterns::Patterns::new(&texts))).map(Self)
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    #[staticmethod]
    fn check(py: Python<'_>, text: &str) -> PyResult<bool> {
        raise(py, patterns::check(text))
    }

    fn find(&self, py: Python<'_>, key: &str) -> PyResult<Option<usize>> {
        raise(py, self.0.find(key))
    }

    fn find_all(&self, py: Python<'_>, key: &str) -> PyResult<Vec<usize>> {
        raise(py, self.0.find_all(key))
    }

    fn used(&self, py: Python<'_>, keys: Vec<PyBackedStr>) -> PyResult<Vec<bool>> {
        let used = py.detach(|| self.0.used(keys.iter().map(|key| &**key)));
        raise(py, used)
    }
}

#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct IndexPattern(patterns::IndexPattern);

#[pymethods]
impl IndexPattern {
    #[new]
    fn new(py: Python<'_>, text: &str) -> PyResult<Self> {
        raise(py, patterns::IndexPattern::new(text)).map(Self)
    }

    fn indices(&self, py: Python<'_>, key: &str) -> PyResult<Vec<u64>> {
        raise(py, self.0.indices(key))
    }
}

#[pyfunction]
#[pyo3(signature = (keys, labels=Vec::new()))]
pub(crate) fn number_groups(
    py: Python<'_>,
    keys: Vec<PyBackedStr>,
    labels: Vec<u32>,
) -> PyResult<(Vec<u32>, Vec<Bound<'_, PyTuple>>)> {
    let (of_keys, groups) = py.detach(|| numbered::groups(&keys, &labels));
    let groups = groups
        .into_iter()
        .map(|one| KEY_GROUP.of(py, (one.first, one.n_keys, one.numbers)));
    Ok((of_keys, groups.collect::<PyResult<_>>()?))
}
