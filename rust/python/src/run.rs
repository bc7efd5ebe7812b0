//! Running the core: on a pool, without the interpreter, with progress and Ctrl-C.

use crate::errors::raise;
use pyo3::prelude::*;
use reshard_core::control::Control;
use reshard_core::{Error, Kind};
use std::collections::HashMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Work smaller than this is over before anyone could press a key.
const QUIET_BYTES: u64 = 8 << 20;
const MAX_THREADS: usize = 1024;
const TICK: Duration = Duration::from_millis(50);

pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs `work` on `threads` threads. Calls `progress(done, total)` and heeds signals meanwhile.
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
    let result = std::thread::scope(|scope| {
        let (sender, receiver) = channel();
        let worker = scope.spawn(move || {
            // Dropping the sender is what wakes the waiting thread, also if this one panics.
            let _sender = sender;
            pool.install(work)
        });
        // A receiver cannot be shared with the closure that runs detached, but it can be moved in and out.
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
        py.detach(|| worker.join())
    });
    let result = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    if let Some(error) = interrupted {
        return Err(error);
    }
    let value = raise(py, result)?;
    report(total_bytes)?;
    Ok(value)
}

/// How many threads are meant: those that are asked for, or one for each processor.
pub(crate) fn n_threads(py: Python<'_>, threads: Option<i64>) -> PyResult<usize> {
    let asked = threads.map_or_else(|| Ok(default_threads().min(MAX_THREADS)), usize::try_from);
    let Some(n_threads) = asked.ok().filter(|n| (1..=MAX_THREADS).contains(n)) else {
        let message = format!(
            "`threads` is {}; 1 to {MAX_THREADS} are accepted",
            threads.unwrap_or_default()
        );
        return raise(py, Err(Error::new(Kind::Argument, message)));
    };
    Ok(n_threads)
}

/// A pool of a size, made once a process: threads do not survive a fork, so a child makes its own.
///
/// The lock is only taken with the interpreter attached, and a fork happens with it attached to the forking thread: no
/// child finds the lock taken.
fn pool(py: Python<'_>, threads: Option<i64>) -> PyResult<Arc<rayon::ThreadPool>> {
    type Pools = Mutex<HashMap<(u32, usize), Arc<rayon::ThreadPool>>>;
    static POOLS: OnceLock<Pools> = OnceLock::new();
    let n_threads = n_threads(py, threads)?;
    let mut pools = POOLS
        .get_or_init(Pools::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let key = (std::process::id(), n_threads);
    if let Some(pool) = pools.get(&key) {
        return Ok(Arc::clone(pool));
    }
    let built = rayon::ThreadPoolBuilder::new()
        .num_threads(n_threads)
        .thread_name(|i| format!("reshard-{i}"))
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
