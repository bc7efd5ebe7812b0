//! Runs work of the core on a thread pool, with the interpreter released, with progress and with Ctrl-C.

use crate::errors::raise;
use pyo3::prelude::*;
use reshard_core::control::Control;
use reshard_core::{Error, Kind};
use std::collections::HashMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Smaller work ends too soon for signals and progress.
const QUIET_BYTES: u64 = 8 << 20;
const MAX_THREADS: usize = 1024;
const TICK: Duration = Duration::from_millis(50);

pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs `work` on `threads` threads. Calls `progress(done, total)` and handles signals while it runs.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    threads: Option<i64>,
    total_bytes: u64,
    progress: Option<&Bound<'_, PyAny>>,
    control: &Control,
    work: impl FnOnce() -> reshard_core::Result<T> + Send,
) -> PyResult<T> {
    let pool = pool(py, threads)?;
    if progress.is_none() && total_bytes < QUIET_BYTES {
        let result = py.detach(|| pool.install(work));
        return raise(py, result);
    }
    let report =
        |done: u64| progress.map_or(Ok(()), |call| call.call1((done, total_bytes)).map(|_| ()));
    report(0)?;
    let mut interrupted = None;
    let mut result = None;
    // The scope waits for the work, and passes on a panic of it.
    pool.in_place_scope(|scope| {
        let (sender, receiver) = channel();
        let result = &mut result;
        scope.spawn(move |_| {
            // Dropping the sender wakes the waiting thread, also after a panic.
            let _sender = sender;
            *result = Some(work());
        });
        // A receiver is not `Sync`, and the closure that runs detached needs a shared reference.
        let receiver = Mutex::new(receiver);
        loop {
            let waited = py.detach(|| {
                let receiver: &std::sync::mpsc::Receiver<()> =
                    &receiver.lock().unwrap_or_else(PoisonError::into_inner);
                receiver.recv_timeout(TICK)
            });
            if waited == Err(RecvTimeoutError::Disconnected) {
                break;
            }
            if interrupted.is_none()
                && let Err(error) = py
                    .check_signals()
                    .and_then(|()| report(control.done_bytes()))
            {
                control.cancel();
                interrupted = Some(error);
            }
        }
    });
    if let Some(error) = interrupted {
        return Err(error);
    }
    let result = result.expect("work that ends without a panic has a result");
    let value = raise(py, result)?;
    report(total_bytes)?;
    Ok(value)
}

/// The number of threads: `threads`, or one per processor.
pub(crate) fn n_threads(py: Python<'_>, threads: Option<i64>) -> PyResult<usize> {
    let requested = threads.map_or_else(|| Ok(default_threads().min(MAX_THREADS)), usize::try_from);
    let Some(n_threads) = requested.ok().filter(|n| (1..=MAX_THREADS).contains(n)) else {
        let message = format!(
            "`threads` is {}; 1 to {MAX_THREADS} are accepted",
            threads.unwrap_or_default()
        );
        return raise(py, Err(Error::new(Kind::Argument, message)));
    };
    Ok(n_threads)
}

/// The pool of a size, one per process: threads do not survive a fork, so a child process creates its own.
///
/// The lock is held only with the interpreter attached, and the forking thread has the interpreter attached: the lock
/// is never held in a new child process.
pub(crate) fn pool(py: Python<'_>, threads: Option<i64>) -> PyResult<Arc<rayon::ThreadPool>> {
    named_pool(py, "reshard", n_threads(py, threads)?)
}

/// As [`pool`], for work that must not wait for other work: a pool for each name.
pub(crate) fn named_pool(
    py: Python<'_>,
    name: &'static str,
    n_threads: usize,
) -> PyResult<Arc<rayon::ThreadPool>> {
    type Pools = Mutex<HashMap<(u32, &'static str, usize), Arc<rayon::ThreadPool>>>;
    static POOLS: OnceLock<Pools> = OnceLock::new();
    let mut pools = POOLS
        .get_or_init(Pools::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let key = (std::process::id(), name, n_threads);
    if let Some(pool) = pools.get(&key) {
        return Ok(Arc::clone(pool));
    }
    let built = rayon::ThreadPoolBuilder::new()
        .num_threads(n_threads)
        .thread_name(move |i| format!("{name}-{i}"))
        .build()
        .map_err(|error| {
            Error::new(
                Kind::Io,
                format!("cannot start {n_threads} threads: {error}"),
            )
        });
    let pool = Arc::new(raise(py, built)?);
    pools.insert(key, Arc::clone(&pool));
    Ok(pool)
}
