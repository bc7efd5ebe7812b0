//! Checksums of bytes and of files.

use crate::buffer::Borrowed;
use crate::errors::raise;
use crate::run::run;
use pyo3::prelude::*;
use reshard_core::checksum::Checksums;
use reshard_core::control::Control;
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

#[pyfunction]
#[pyo3(signature = (path, n_bytes, checksums, *, direct=true, threads=None, progress=None))]
pub(crate) fn scrub(
    py: Python<'_>,
    path: PathBuf,
    n_bytes: u64,
    checksums: &[u8],
    direct: bool,
    threads: Option<i64>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<(u64, u64)>> {
    // The header is part of the first chunks.
    let checksums = raise(py, Checksums::from_bytes(n_bytes, 0, 0, checksums))?;
    let control = Control::default();
    run(py, threads, n_bytes, progress, &control, || {
        let source = Source::open(&path, false, Method::Read)?;
        verify::scrub(&source, &checksums, direct, &control)
    })
}
