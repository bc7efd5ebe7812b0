//! The tensors in the files of `torch.save` of all ranks, as columns of the core.

use crate::errors::raise;
use crate::index::Index;
use crate::records::{RANK_TENSOR, tensor_kind};
use crate::run::run;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rayon::prelude::*;
use reshard_core::control::Control;
use reshard_formats::rank_tensors::{RankFile, ReadFile};
use std::path::PathBuf;

/// Files that are read before their tensors are added.
const MAX_READ: usize = 16;

/// The tensors of all ranks.
#[pyclass(module = "reshard._core")]
pub(crate) struct RankTensors(pub(crate) reshard_formats::rank_tensors::RankTensors);

#[pymethods]
impl RankTensors {
    #[pyo3(signature = (file=None))]
    fn tensors<'py>(
        &self,
        py: Python<'py>,
        file: Option<u32>,
    ) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let found = self.0.tensors(file).into_iter();
        let of = found.map(|(file, key, held)| {
            let local = PyTuple::new(py, &held.local)?;
            let path = file.path.to_string_lossy();
            RANK_TENSOR.of(py, (path, key, tensor_kind(py, held.class)?, local))
        });
        of.collect()
    }

    fn has_values(&self) -> Vec<bool> {
        self.0.files().iter().map(|file| file.has_values).collect()
    }

    fn add_to(
        &self,
        py: Python<'_>,
        index: &mut Index,
        keys: Vec<String>,
        hint: &str,
    ) -> PyResult<Vec<String>> {
        let added = py.detach(|| {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let copied = self.0.add_to(index.core_mut(), &keys, hint)?;
            Ok(copied.into_iter().map(str::to_owned).collect())
        });
        raise(py, added)
    }

    fn first_different(
        &self,
        py: Python<'_>,
        index: &Index,
        keys: Vec<String>,
    ) -> PyResult<Option<(String, u64, u64)>> {
        let control = Control::default();
        run(py, None, 0, None, &control, || {
            self.0.first_different(index.core(), &keys, &control)
        })
    }
}

/// The tensors of the files of ranks, each given as path, number in the index and rank.
#[pyfunction]
#[pyo3(signature = (files, *, prefix="", n_ranks=None))]
pub(crate) fn read_torch_ranks(
    py: Python<'_>,
    files: Vec<(PathBuf, u32, u64)>,
    prefix: &str,
    n_ranks: Option<u64>,
) -> PyResult<RankTensors> {
    let files: Vec<RankFile> = files
        .into_iter()
        .map(|(path, file, rank)| RankFile { path, file, rank })
        .collect();
    let control = Control::default();
    let read = run(py, None, 0, None, &control, || {
        let mut tensors = reshard_formats::rank_tensors::RankTensors::default();
        for files in files.chunks(MAX_READ) {
            control.check()?;
            let read = files
                .par_iter()
                .map(|file| ReadFile::read(file, prefix, n_ranks));
            for (file, read) in files.iter().zip(read.collect::<Vec<_>>()) {
                tensors.push(file.clone(), prefix, read?)?;
            }
        }
        Ok(tensors)
    })?;
    Ok(RankTensors(read))
}
