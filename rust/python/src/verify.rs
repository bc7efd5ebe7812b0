//! Checksums of bytes and of files, and what values are.

use crate::buffer::Borrowed;
use crate::errors::raise;
use crate::records::{ARRAY_COUNTS, CHANGES};
use crate::run::run;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use reshard_core::changes::{Changes, changes as changes_of};
use reshard_core::checksum::Checksums;
use reshard_core::control::Control;
use reshard_core::dtype::Dtype;
use reshard_core::finite::{self, Counted, Finder};
use reshard_core::source::{Method, Source};
use reshard_core::verify;
use reshard_core::{Error, Kind};
use std::path::PathBuf;

#[pyfunction]
#[pyo3(signature = (data, before=0))]
pub(crate) fn crc32c(py: Python<'_>, data: &Bound<'_, PyAny>, before: u32) -> PyResult<u32> {
    let data = Borrowed::readable(data, 1, false)?;
    if !data.is_row_major() {
        let error = Error::new(
            Kind::Argument,
            "cannot compute the checksum of an array that is not contiguous",
        );
        return raise(py, Err(error.hint("pass a contiguous copy of it")));
    }
    Ok(py.detach(|| reshard_core::checksum::crc32c(before, data.bytes())))
}

#[pyclass(module = "reshard._core", frozen)]
pub(crate) struct ValueCounts(Finder);

#[pymethods]
impl ValueCounts {
    #[new]
    #[pyo3(signature = (arrays, digests=Vec::new()))]
    fn new(
        py: Python<'_>,
        arrays: Vec<(String, u64, u64, bool)>,
        digests: Vec<(usize, String, Vec<u64>)>,
    ) -> PyResult<Self> {
        let made = || {
            let arrays = arrays
                .into_iter()
                .map(|(dtype, start, n_bytes, is_non_negative)| {
                    Ok(Counted {
                        dtype: Dtype::parse(&dtype)?,
                        start,
                        n_bytes,
                        is_non_negative,
                        digests: Vec::new(),
                    })
                });
            let mut arrays = arrays.collect::<reshard_core::Result<Vec<_>>>()?;
            for (number, dtype, cuts) in digests {
                let array = arrays.get_mut(number).ok_or_else(|| {
                    Error::new(Kind::Argument, format!("there is no array {number}"))
                })?;
                array.digests.push((Dtype::parse(&dtype)?, cuts));
            }
            Finder::counting(&arrays)
        };
        raise(py, made()).map(Self)
    }

    fn digest(
        &self,
        py: Python<'_>,
        number: usize,
        dtype: &str,
        start: u64,
        n_bytes: u64,
    ) -> PyResult<Option<u64>> {
        let dtype = raise(py, Dtype::parse(dtype))?;
        Ok(self.0.digest(number, dtype, start, n_bytes))
    }

    #[pyo3(signature = (at, data, *, threads=None))]
    fn look(
        &self,
        py: Python<'_>,
        at: u64,
        data: &Bound<'_, PyAny>,
        threads: Option<i64>,
    ) -> PyResult<()> {
        let data = contiguous(py, data)?;
        run(py, threads, 0, None, &Control::default(), || {
            self.0.look_together(at, data.bytes());
            Ok(())
        })
    }

    fn found<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let found = self.0.counted().into_iter();
        found
            .map(|(number, one)| {
                let values = (
                    number,
                    one.n_nan,
                    one.n_infinite,
                    one.first_not_finite,
                    one.n_negative,
                    one.first_negative,
                );
                ARRAY_COUNTS.of(py, values)
            })
            .collect()
    }
}

#[pyfunction]
#[pyo3(signature = (dtype, a, b, *, threads=None))]
pub(crate) fn differing(
    py: Python<'_>,
    dtype: &str,
    a: &Bound<'_, PyAny>,
    b: &Bound<'_, PyAny>,
    threads: Option<i64>,
) -> PyResult<(u64, Option<u64>)> {
    let dtype = raise(py, Dtype::parse(dtype))?;
    let (a, b) = (contiguous(py, a)?, contiguous(py, b)?);
    run(py, threads, 0, None, &Control::default(), || {
        finite::differing(dtype, a.bytes(), b.bytes())
    })
}

#[pyfunction]
#[pyo3(signature = (a, b, *, tolerance=None, threads=None))]
pub(crate) fn changes<'py>(
    py: Python<'py>,
    a: (String, Bound<'py, PyAny>),
    b: (String, Bound<'py, PyAny>),
    tolerance: Option<(f64, f64)>,
    threads: Option<i64>,
) -> PyResult<Bound<'py, PyTuple>> {
    let [dtype_a, dtype_b] = [&a.0, &b.0].map(|name| raise(py, Dtype::parse(name)));
    let (dtype_a, dtype_b) = (dtype_a?, dtype_b?);
    let (bytes_a, bytes_b) = (contiguous(py, &a.1)?, contiguous(py, &b.1)?);
    let found: Changes = run(py, threads, 0, None, &Control::default(), || {
        changes_of(
            (dtype_a, bytes_a.bytes()),
            (dtype_b, bytes_b.bytes()),
            tolerance,
        )
    })?;
    let values = (
        found.n_different,
        found.n_nan,
        found.n_outside,
        found.max_abs,
        found.squares_a,
        found.squares_b,
        found.squares_change,
    );
    CHANGES.of(py, values)
}

fn contiguous(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<Borrowed> {
    let data = Borrowed::readable(data, 1, false)?;
    if data.is_row_major() {
        return Ok(data);
    }
    let error = Error::new(
        Kind::Argument,
        "cannot look at the values of an array that is not contiguous",
    );
    raise(py, Err(error.hint("pass a contiguous copy of it")))
}

#[pyfunction]
#[pyo3(signature = (path, n_bytes, checksums, *, start=0, end=None, direct=true, values=None, threads=None, progress=None))]
#[expect(clippy::too_many_arguments, reason = "the options of a scrub")]
pub(crate) fn scrub(
    py: Python<'_>,
    path: PathBuf,
    n_bytes: u64,
    checksums: &[u8],
    start: u64,
    end: Option<u64>,
    direct: bool,
    values: Option<&Bound<'_, ValueCounts>>,
    threads: Option<i64>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<(u64, u64)>> {
    // The header is part of the first chunks.
    let checksums = raise(py, Checksums::from_bytes(n_bytes, 0, 0, checksums))?;
    let control = Control::default();
    let values = values.map(|values| &values.get().0);
    let range = start..end.unwrap_or(n_bytes);
    let to_read = range.end.saturating_sub(start);
    run(py, threads, to_read, progress, &control, || {
        let source = Source::open(&path, false, Method::Read)?;
        verify::scrub(&source, &checksums, range, values, direct, &control)
    })
}
