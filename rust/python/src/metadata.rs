//! Writing `metadata.json`.

use crate::errors::raise;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyString};
use reshard_formats::metadata::DeviceLayout;
use reshard_formats::metadata::write::{Cell, Description, Encoder, File, Grid, Kind, is_plain};
use std::collections::HashMap;

/// Whether all are of class `str`, plain and of 1 to `max_bytes` bytes.
#[pyfunction]
pub(crate) fn are_plain(names: &Bound<'_, PyAny>, max_bytes: usize) -> PyResult<bool> {
    for name in names.try_iter()? {
        let is_plain_name = match name?.cast_exact::<PyString>() {
            // A text with a surrogate has no UTF-8.
            Ok(name) => (name.to_str())
                .is_ok_and(|name| (1..=max_bytes).contains(&name.len()) && is_plain(name)),
            Err(_) => false,
        };
        if !is_plain_name {
            return Ok(false);
        }
    }
    Ok(true)
}

type KindArguments = (String, Vec<u64>, usize, usize);
type GridArguments = (Vec<u64>, Vec<u64>, usize, Vec<u64>);
type LayoutArguments = (Vec<u64>, Vec<Vec<u64>>, Vec<String>, Vec<u64>);
type CellArguments = (u64, Vec<u64>, Vec<usize>);
type FileArguments = (String, u64, Option<Vec<Option<u32>>>);

/// The pieces of a text, and the table of it.
#[pyclass(module = "reshard._core")]
pub(crate) struct MetadataEncoder(Encoder<PyBackedStr>);

#[pymethods]
impl MetadataEncoder {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "the lists of a description")]
    fn new(
        py: Python<'_>,
        keys: Vec<PyBackedStr>,
        kind_of: Vec<u32>,
        kinds: Vec<KindArguments>,
        grids: Vec<GridArguments>,
        layouts: Vec<LayoutArguments>,
        cells: Vec<Vec<CellArguments>>,
        files: Vec<FileArguments>,
        shard_names: HashMap<u32, (String, String)>,
    ) -> PyResult<Self> {
        let kind = |(dtype, shape, grid, cells): KindArguments| Kind {
            dtype,
            shape,
            grid,
            cells,
        };
        let grid = |(replica_id, fragmentations, layout, offsets): GridArguments| Grid {
            replica_id,
            fragmentations,
            layout,
            offsets,
        };
        let layout =
            |(device_matrix, tensor_map, alias_name, rank_list): LayoutArguments| DeviceLayout {
                device_matrix,
                tensor_map,
                alias_name,
                rank_list,
                interleaved_parallel: false,
            };
        let cell = |(offset, rank_group, files): CellArguments| Cell {
            offset,
            rank_group,
            files,
        };
        let n_tensors = keys.len() as u32;
        let file = |(name, rank, tensors): FileArguments| File {
            name,
            rank,
            tensors: match tensors {
                Some(numbers) => numbers.into_iter().flatten().collect(),
                None => (0..n_tensors).collect(),
            },
        };
        let description = Description {
            keys,
            kind_of,
            kinds: kinds.into_iter().map(kind).collect(),
            grids: grids.into_iter().map(grid).collect(),
            layouts: layouts.into_iter().map(layout).collect(),
            cells: cells
                .into_iter()
                .map(|list| list.into_iter().map(cell).collect())
                .collect(),
            files: files.into_iter().map(file).collect(),
            shard_names,
        };
        raise(py, py.detach(|| Encoder::new(description))).map(Self)
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let piece = py.detach(|| self.0.piece());
        let piece = raise(py, piece)?;
        Ok(piece.map(|piece| PyBytes::new(py, &piece)))
    }

    fn table<'py>(&mut self, py: Python<'py>, digest: &str) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &raise(py, self.0.table(digest))?))
    }
}
