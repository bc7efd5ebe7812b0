//! Writing files: from plans, from arrays, from snapshots of arrays.

use crate::arrays::InputTensors;
use crate::errors::raise;
use crate::records::{FOLDER_ENTRY, not_finite_list};
use crate::run::{n_threads, named_pool, pool, run};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use rayon::prelude::*;
use reshard_core::control::Control;
use reshard_core::plan::Plan as CorePlan;
use reshard_core::{Error, Kind};
use reshard_core::{snapshot, writer};
use std::collections::BTreeMap;
use std::fs::{DirEntry, read_dir};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;

const DEFAULT_MEMORY_BYTES: u64 = 256 << 20;
const SYNC_THREADS: usize = 8; // they wait for the disk

/// Size and checksums of a file that was written.
#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Written(pub(crate) writer::Written);

#[pymethods]
impl Written {
    #[getter]
    fn n_bytes(&self) -> u64 {
        self.0.n_bytes()
    }

    #[getter]
    fn header_bytes(&self) -> u64 {
        self.0.header_bytes()
    }

    #[getter]
    fn header_checksum(&self) -> u32 {
        self.0.header_checksum()
    }

    #[getter]
    fn checksums<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    #[getter]
    fn not_finite<'py>(&self, py: Python<'py>) -> PyResult<Vec<(String, Bound<'py, PyAny>)>> {
        not_finite_list(py, &self.0.not_finite)
    }

    #[getter]
    fn e_tag(&self) -> Option<&str> {
        self.0.e_tag.as_deref()
    }

    fn __repr__(&self) -> String {
        format!("<reshard._core.Written {} bytes>", self.0.n_bytes())
    }
}

/// Memory through which files are written.
#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Buffers {
    buffers: Arc<Mutex<writer::Buffers>>,
    touching: Mutex<Option<Touching>>,
}

/// A thread that touches the memory.
struct Touching {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

#[pymethods]
impl Buffers {
    #[new]
    fn new(py: Python<'_>, memory_bytes: u64) -> PyResult<Self> {
        let buffers = raise(py, writer::Buffers::new(memory_bytes))?;
        Ok(Self {
            buffers: Arc::new(Mutex::new(buffers)),
            touching: Mutex::new(None),
        })
    }

    /// Starts a thread that touches the memory for a file of this size, until the file is written.
    fn prepare(&self, py: Python<'_>, n_bytes: u64) {
        self.stop_touching(py);
        let stop = Arc::new(AtomicBool::new(false));
        let (buffers, stopped) = (Arc::clone(&self.buffers), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("reshard-touch".to_owned());
        let started = thread.spawn(move || {
            if let Ok(mut buffers) = buffers.try_lock() {
                let _ = buffers.touch(n_bytes, &stopped); // the write returns the error
            }
        });
        // Where no thread can be started, the write touches all of the memory.
        *self.touching.lock().unwrap_or_else(PoisonError::into_inner) =
            started.ok().map(|thread| Touching { stop, thread });
    }
}

impl Buffers {
    /// Waits until the memory is not touched any more: some milliseconds at most.
    fn stop_touching(&self, py: Python<'_>) {
        let running = self
            .touching
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(Touching { stop, thread }) = running {
            stop.store(true, Ordering::Relaxed);
            let _ = py.detach(|| thread.join()); // a thread that panicked has touched less
        }
    }
}

/// Calls `write` with the buffers, or with new ones.
pub(crate) fn with_buffers<T>(
    py: Python<'_>,
    buffers: Option<&Buffers>,
    write: impl FnOnce(&mut writer::Buffers) -> PyResult<T>,
) -> PyResult<T> {
    let own;
    let buffers = if let Some(buffers) = buffers {
        buffers
    } else {
        own = Buffers::new(py, DEFAULT_MEMORY_BYTES)?;
        &own
    };
    buffers.stop_touching(py);
    // Waiting here would block another thread that needs the interpreter.
    let mut buffers = match buffers.buffers.try_lock() {
        Ok(buffers) => buffers,
        // A write panicked. Its memory can be used again.
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => {
            let message = "another thread is writing with these buffers";
            return raise(py, Err(Error::new(Kind::Argument, message)));
        }
    };
    write(&mut buffers)
}

pub(crate) fn write_plan(
    py: Python<'_>,
    path: &Path,
    plan: &CorePlan<'_>,
    options: &writer::Options,
    buffers: Option<&Buffers>,
    threads: Option<i64>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Written> {
    with_buffers(py, buffers, |buffers| {
        let control = Control::default();
        if threads.is_some() {
            // Counting the processors reads four files of the system.
            n_threads(py, threads)?;
        }
        if writer::is_small(plan, options) && !reshard_core::source::is_url(path) {
            // Passing a small file to a pool takes longer than writing it, and checkpoints can have thousands of them.
            let report = |done: u64| {
                progress.map_or(Ok(()), |call| {
                    call.call1((done, plan.n_bytes())).map(|_| ())
                })
            };
            report(0)?;
            let written = py.detach(|| writer::write(path, plan, options, buffers, &control));
            let written = raise(py, written)?;
            py.check_signals()?;
            report(plan.n_bytes())?;
            return Ok(Written(written));
        }
        // A write waits for the disk, so signals are handled for any size.
        let written = run(py, threads, plan.n_bytes(), progress, &control, || {
            writer::write(path, plan, options, buffers, &control)
        })?;
        Ok(Written(written))
    })
}

#[pyfunction]
#[pyo3(signature = (path, tensors, *, metadata=None, buffers=None, threads=None, durable=true, direct=true, mode=0o640, progress=None))]
#[expect(clippy::too_many_arguments, reason = "the options of a file")]
pub(crate) fn write_arrays(
    py: Python<'_>,
    path: PathBuf,
    tensors: &Bound<'_, PyAny>,
    metadata: Option<BTreeMap<String, String>>,
    buffers: Option<&Buffers>,
    threads: Option<i64>,
    durable: bool,
    direct: bool,
    mode: u32,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Written> {
    let inputs = InputTensors::new(py, tensors)?;
    let options = writer::Options {
        metadata: metadata.unwrap_or_default().into_iter().collect(),
        container: None,
        durable,
        direct,
        mode,
    };
    let plan = inputs.plan(py)?;
    write_plan(py, &path, &plan, &options, buffers, threads, progress)
}

#[pyfunction]
#[pyo3(signature = (source, target, *, exchange))]
pub(crate) fn rename(
    py: Python<'_>,
    source: PathBuf,
    target: PathBuf,
    exchange: bool,
) -> PyResult<()> {
    py.detach(|| writer::rename(&source, &target, exchange))
        .map_err(|error| os_error(error, None))
}

#[pyfunction]
pub(crate) fn sync_together(
    py: Python<'_>,
    files: Vec<PathBuf>,
    folders: Vec<PathBuf>,
) -> PyResult<()> {
    // Where no threads can be started, this thread syncs one after the other.
    let pool = named_pool(py, "reshard-sync", SYNC_THREADS).ok();
    py.detach(|| match pool {
        Some(pool) => pool.install(|| writer::sync_together(&files, &folders)),
        None => writer::sync_in_turn(&files, &folders),
    })
    .map_err(|(index, error)| os_error(error, files.iter().chain(&folders).nth(index)))
}

/// Name, mode and bytes of each entry of a folder, sorted by name. Links are not followed.
#[pyfunction]
pub(crate) fn folder_sizes(py: Python<'_>, folder: PathBuf) -> PyResult<Vec<Bound<'_, PyTuple>>> {
    const MANY: usize = 1024; // starting a pool takes longer than some hundred files
    let of = |entry: &DirEntry| {
        let found = entry.metadata()?;
        Ok((entry.file_name(), found.mode(), found.len()))
    };
    let list = || read_dir(&folder)?.collect::<std::io::Result<Vec<_>>>();
    let entries = py.detach(list).map_err(|error| os_error(error, None))?;
    let found: std::io::Result<Vec<_>> = if entries.len() < MANY {
        py.detach(|| entries.iter().map(of).collect())
    } else {
        let pool = pool(py, None)?;
        py.detach(|| pool.install(|| entries.par_iter().map(of).collect()))
    };
    let mut found = found.map_err(|error| os_error(error, None))?;
    found.sort_unstable();
    let records = found.into_iter();
    records.map(|entry| FOLDER_ENTRY.of(py, entry)).collect()
}

/// With the error number, by which callers distinguish errors, and the path if one is given.
fn os_error(error: std::io::Error, path: Option<&PathBuf>) -> PyErr {
    let Some(number) = error.raw_os_error() else {
        return error.into();
    };
    let text = error.to_string();
    let reason = text
        .split(" (os error")
        .next()
        .unwrap_or_default()
        .to_owned();
    match path {
        Some(path) => {
            pyo3::exceptions::PyOSError::new_err((number, reason, path.clone().into_os_string()))
        }
        None => pyo3::exceptions::PyOSError::new_err((number, reason)),
    }
}

/// A pool of memory for snapshots.
#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct SnapshotPool(Arc<snapshot::Pool>);

#[pymethods]
impl SnapshotPool {
    #[new]
    #[pyo3(signature = (max_free_bytes=None))]
    fn new(max_free_bytes: Option<u64>) -> Self {
        Self(Arc::new(snapshot::Pool::new(
            max_free_bytes.unwrap_or(u64::MAX),
        )))
    }

    #[getter]
    fn free_bytes(&self) -> u64 {
        self.0.free_bytes()
    }

    #[expect(clippy::needless_pass_by_value, reason = "converted from a list")]
    fn reserve(&self, image_bytes: Vec<u64>) {
        self.0.reserve(&image_bytes);
    }

    #[pyo3(signature = (tensors, *, metadata=None, threads=None))]
    fn take(
        &self,
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        metadata: Option<BTreeMap<String, String>>,
        threads: Option<i64>,
    ) -> PyResult<Snapshot> {
        let inputs = InputTensors::new(py, tensors)?;
        let metadata: Vec<_> = metadata.unwrap_or_default().into_iter().collect();
        let control = Control::default();
        let plan = inputs.plan(py)?;
        let taken = run(py, threads, plan.n_bytes(), None, &control, || {
            snapshot::Snapshot::take(&self.0, &plan, &metadata, &control)
        })?;
        Ok(Snapshot {
            n_bytes: taken.n_bytes(),
            taken: Mutex::new(Some(Arc::new(taken))),
        })
    }
}

/// The image of a shard file in memory of a pool.
#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Snapshot {
    n_bytes: u64,
    taken: Mutex<Option<Arc<snapshot::Snapshot>>>,
}

#[pymethods]
impl Snapshot {
    #[getter]
    fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    #[pyo3(signature = (path, *, threads=None, durable=true, direct=true, mode=0o640, progress=None))]
    #[expect(clippy::too_many_arguments, reason = "the options of a file")]
    fn write(
        &self,
        py: Python<'_>,
        path: PathBuf,
        threads: Option<i64>,
        durable: bool,
        direct: bool,
        mode: u32,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Written> {
        // The lock is held only briefly, and never while the interpreter is released.
        let taken = self.taken.lock().ok().and_then(|taken| taken.clone());
        let closed = || Error::new(Kind::Argument, "the snapshot is closed");
        let taken = raise(py, taken.ok_or_else(closed))?;
        let options = writer::Options {
            metadata: Vec::new(),
            container: None,
            durable,
            direct,
            mode,
        };
        let control = Control::default();
        let written = run(py, threads, self.n_bytes, progress, &control, || {
            taken.write(&path, &options, &control)
        })?;
        Ok(Written(written))
    }

    fn close(&self) {
        if let Ok(mut taken) = self.taken.lock() {
            *taken = None;
        }
    }
}
