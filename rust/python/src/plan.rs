//! Carrying out plans and writing files.

use crate::buffer::{Borrowed, Buffer, disjoint};
use crate::errors::raise;
use crate::run::run;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use reshard_core::copy::{Control, fill};
use reshard_core::dtype::Dtype;
use reshard_core::memory::{Memory, Stores};
use reshard_core::plan::{MemoryTensor, Plan as CorePlan, PlanSource};
use reshard_core::writer;
use reshard_core::{Error, Kind};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Arrays from this size on get memory of their own, so that dropping one frees it.
const OWN_MEMORY_BYTES: u64 = 2 << 20;
/// Smaller ones share memory of this size.
const SHARED_MEMORY_BYTES: u64 = 8 << 20;
const ALIGN_BYTES: u64 = 64;
const DEFAULT_MEMORY_BYTES: u64 = 256 << 20;

#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Plan(pub(crate) CorePlan<'static>);

/// Memory through which files are written.
#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Windows(Mutex<writer::Windows>);

#[pymethods]
impl Windows {
    #[new]
    fn new(py: Python<'_>, memory_bytes: u64) -> PyResult<Self> {
        raise(py, writer::Windows::new(memory_bytes)).map(|windows| Self(Mutex::new(windows)))
    }
}

#[pymethods]
impl Plan {
    #[getter]
    fn arrays<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(String, &'static str, Bound<'py, PyTuple>, u64)>> {
        let arrays = self.0.arrays().iter();
        arrays
            .map(|a| {
                Ok((
                    a.name.clone(),
                    a.dtype.name(),
                    PyTuple::new(py, &a.shape)?,
                    a.n_bytes(),
                ))
            })
            .collect()
    }

    #[getter]
    fn n_bytes(&self) -> u64 {
        self.0.n_bytes()
    }

    #[getter]
    fn n_pieces(&self) -> usize {
        self.0.n_pieces()
    }

    #[getter]
    fn source_bytes(&self) -> BTreeMap<u32, u64> {
        self.0.source_bytes()
    }

    fn only(&self, py: Python<'_>, arrays: Vec<usize>) -> PyResult<Self> {
        raise(py, self.0.only(&arrays)).map(Self)
    }

    #[pyo3(signature = (*, threads=None, progress=None))]
    fn load<'py>(
        &self,
        py: Python<'py>,
        threads: Option<i64>,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<(Bound<'py, Buffer>, u64)>> {
        // Which memory an array lies in and where.
        let mut sizes: Vec<u64> = Vec::new();
        let mut shared: Option<usize> = None;
        let mut places = Vec::with_capacity(self.0.arrays().len());
        for array in self.0.arrays() {
            let n_bytes = array.n_bytes();
            if n_bytes >= OWN_MEMORY_BYTES {
                places.push((sizes.len(), 0));
                sizes.push(n_bytes);
                continue;
            }
            let room = n_bytes.next_multiple_of(ALIGN_BYTES);
            let fits = |i: &usize| sizes[*i] + room <= SHARED_MEMORY_BYTES;
            let memory = shared.filter(fits).unwrap_or(sizes.len());
            if memory == sizes.len() {
                sizes.push(0);
            }
            shared = Some(memory);
            places.push((memory, sizes[memory]));
            sizes[memory] += room;
        }
        let mut memories = raise(
            py,
            sizes
                .iter()
                .map(|size| Memory::new(*size as usize))
                .collect::<Result<Vec<_>, _>>(),
        )?;
        let control = Control::default();
        run(py, threads, self.0.n_bytes(), progress, &control, || {
            let mut rests: Vec<(u64, &mut [u8])> = memories
                .iter_mut()
                .map(|memory| (0, memory.as_mut_slice()))
                .collect();
            let mut out = Vec::with_capacity(places.len());
            for (array, &(memory, start)) in self.0.arrays().iter().zip(&places) {
                let (at, rest) = std::mem::take(&mut rests[memory]);
                let (_, rest) = rest.split_at_mut((start - at) as usize);
                let (to, rest) = rest.split_at_mut(array.n_bytes() as usize);
                rests[memory] = (start + array.n_bytes(), rest);
                out.push(to);
            }
            fill(&self.0, out, Stores::Plain, &control)
        })?;
        let buffers: Vec<_> = memories
            .into_iter()
            .map(|memory| Bound::new(py, Buffer::of_memory(memory)))
            .collect::<PyResult<_>>()?;
        Ok(places
            .into_iter()
            .map(|(memory, start)| (buffers[memory].clone(), start))
            .collect())
    }

    #[pyo3(signature = (out, *, threads=None, progress=None))]
    fn fill(
        &self,
        py: Python<'_>,
        out: Vec<Bound<'_, PyAny>>,
        threads: Option<i64>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let borrowed = out
            .iter()
            .map(Borrowed::writable)
            .collect::<PyResult<Vec<_>>>()?;
        disjoint(py, &borrowed)?;
        let control = Control::default();
        run(py, threads, self.0.n_bytes(), progress, &control, || {
            fill(
                &self.0,
                borrowed.iter().map(Borrowed::bytes_mut).collect(),
                Stores::Streaming,
                &control,
            )
        })?;
        Ok(control.fetched_bytes())
    }

    fn views<'py>(&self, py: Python<'py>) -> PyResult<Vec<Option<(Bound<'py, Buffer>, u64)>>> {
        let mut maps: HashMap<u32, Bound<'py, Buffer>> = HashMap::new();
        let mut views = Vec::with_capacity(self.0.arrays().len());
        for array in self.0.arrays() {
            let view = array
                .contiguous()
                .and_then(|piece| match self.0.source(piece) {
                    PlanSource::File(id, file) => Some((*id, file, piece.src_start_bytes)),
                    PlanSource::Memory(_) => None,
                });
            let Some((id, file, start)) = view else {
                views.push(None);
                continue;
            };
            let buffer = if let Some(buffer) = maps.get(&id) {
                buffer.clone()
            } else {
                let map = raise(py, file.source().private_map())?;
                let buffer = Bound::new(py, Buffer::of_map(map))?;
                maps.insert(id, buffer.clone());
                buffer
            };
            // An unaligned view would be slow for everyone and refused by some: those are copied.
            let is_aligned = (buffer.get().address() as u64 + start)
                .is_multiple_of(array.unit_bytes().next_power_of_two());
            views.push(is_aligned.then_some((buffer, start)));
        }
        Ok(views)
    }

    #[pyo3(signature = (path, *, metadata=None, windows=None, threads=None, durable=true, direct=true, mode=0o640, progress=None))]
    #[expect(clippy::too_many_arguments, reason = "the options of a file")]
    fn write(
        &self,
        py: Python<'_>,
        path: PathBuf,
        metadata: Option<BTreeMap<String, String>>,
        windows: Option<&Windows>,
        threads: Option<i64>,
        durable: bool,
        direct: bool,
        mode: u32,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let metadata = metadata.unwrap_or_default().into_iter().collect();
        let options = writer::Options {
            metadata,
            durable,
            direct,
            mode,
        };
        let Some(windows) = windows else {
            let mut windows = raise(py, writer::Windows::new(DEFAULT_MEMORY_BYTES))?;
            return write_plan(
                py,
                &path,
                &self.0,
                &options,
                &mut windows,
                threads,
                progress,
            );
        };
        // Waiting for another thread here would keep the interpreter from it.
        let busy = |_| {
            Error::new(
                Kind::Argument,
                "another thread writes through these windows",
            )
        };
        let mut windows = raise(py, windows.0.try_lock().map_err(busy))?;
        write_plan(
            py,
            &path,
            &self.0,
            &options,
            &mut windows,
            threads,
            progress,
        )
    }
}

fn write_plan(
    py: Python<'_>,
    path: &Path,
    plan: &CorePlan<'_>,
    options: &writer::Options,
    windows: &mut writer::Windows,
    threads: Option<i64>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    let control = Control::default();
    // Whatever its size, a write waits for the disk: signals are heeded.
    let written = run(py, threads, plan.n_bytes(), progress, &control, || {
        writer::write(path, plan, options, windows, &control)
    })?;
    Ok(written.n_bytes)
}

#[pyfunction]
#[pyo3(signature = (path, tensors, *, metadata=None, memory_bytes=268_435_456, threads=None, durable=true, direct=true, mode=0o640, progress=None))]
#[expect(clippy::too_many_arguments, reason = "the options of a file")]
pub(crate) fn write_arrays(
    py: Python<'_>,
    path: PathBuf,
    tensors: Vec<(String, String, Vec<u64>, Bound<'_, PyAny>)>,
    metadata: Option<BTreeMap<String, String>>,
    memory_bytes: u64,
    threads: Option<i64>,
    durable: bool,
    direct: bool,
    mode: u32,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    let mut borrowed = Vec::with_capacity(tensors.len());
    for (name, dtype, shape, object) in &tensors {
        let dtype = raise(py, Dtype::parse(dtype))?;
        let buffer = Borrowed::readable(object)?;
        let (per_unit, unit_bytes) = dtype.unit();
        let n_bytes = dtype.n_bytes(shape).unwrap_or(u64::MAX);
        let agrees = if per_unit == 1 && !buffer.strides_bytes().is_empty() {
            buffer.shape() == *shape && buffer.range().1 as u64 == n_bytes && unit_bytes > 0
        } else {
            buffer.range().1 as u64 == n_bytes
        };
        if !agrees {
            let message = format!(
                "`{name}` is told to be {dtype} of shape {shape:?}; its buffer has {} bytes of shape {:?}",
                buffer.range().1,
                buffer.shape()
            );
            return raise(py, Err(Error::new(Kind::Mismatch, message).key(name)));
        }
        borrowed.push((name.clone(), dtype, shape.clone(), buffer));
    }
    let sources = borrowed
        .iter()
        .map(|(name, dtype, shape, buffer)| MemoryTensor {
            name: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
            bytes: buffer.bytes(),
            strides_bytes: buffer.strides_bytes(),
        });
    let plan = raise(py, CorePlan::of_memory(sources.collect()))?;
    let metadata = metadata.unwrap_or_default().into_iter().collect();
    let options = writer::Options {
        metadata,
        durable,
        direct,
        mode,
    };
    let mut windows = raise(py, writer::Windows::new(memory_bytes))?;
    write_plan(py, &path, &plan, &options, &mut windows, threads, progress)
}

#[pyfunction]
#[pyo3(signature = (source, target, *, exchange))]
pub(crate) fn rename(
    py: Python<'_>,
    source: PathBuf,
    target: PathBuf,
    exchange: bool,
) -> PyResult<()> {
    Ok(py.detach(|| writer::rename(&source, &target, exchange))?)
}
