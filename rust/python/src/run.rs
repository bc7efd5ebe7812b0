//! Runs work of the core on a thread pool, with the interpreter released, with progress and with Ctrl-C.

use crate::errors::raise;
use pyo3::prelude::*;
use reshard_core::control::Control;
use reshard_core::team::Team;
use reshard_core::{Error, Kind};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

const MAX_THREADS: usize = 1024;

pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs `work` on a pool of `threads` threads. Calls `progress(done, total)` and handles signals while it runs.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    threads: Option<i64>,
    total_bytes: u64,
    progress: Option<&Bound<'_, PyAny>>,
    control: &Control,
    work: impl FnOnce() -> reshard_core::Result<T> + Send,
) -> PyResult<T> {
    run_in_team(py, threads, total_bytes, progress, control, |team| {
        team.install(work)
    })
}

/// As [`run`], for work that the calling thread begins, and that uses `threads` threads, counting this one.
pub(crate) fn run_in_team<T: Send>(
    py: Python<'_>,
    threads: Option<i64>,
    total_bytes: u64,
    progress: Option<&Bound<'_, PyAny>>,
    control: &Control,
    work: impl FnOnce(&Team<'_>) -> reshard_core::Result<T> + Send,
) -> PyResult<T> {
    let pool = pool(py, threads)?;
    let progress = progress.map(|call| call.clone().unbind());
    let report = |py: Python<'_>, done: u64| match &progress {
        Some(call) => call.call1(py, (done, total_bytes)).map(drop),
        None => Ok(()),
    };
    report(py, 0)?;
    let (result, interrupted) = py.detach(|| {
        let interrupted = RefCell::new(None);
        let tick = || {
            if interrupted.borrow().is_some() {
                return;
            }
            let signals = |py: Python<'_>| {
                py.check_signals()?;
                report(py, control.done_bytes())
            };
            if let Err(error) = Python::attach(signals) {
                control.cancel();
                interrupted.replace(Some(error));
            }
        };
        let result = work(&Team::new(&pool, &tick));
        (result, interrupted.into_inner())
    });
    if let Some(error) = interrupted {
        return Err(error);
    }
    let value = raise(py, result)?;
    report(py, total_bytes)?;
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
/// The lock is held only with the interpreter attached, while no Python code runs, and the forking thread has the
/// interpreter attached: the lock is never held in a new child process, nor by a thread that waits for the interpreter.
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
    let key = (std::process::id(), name, n_threads);
    let pool = {
        let mut pools = POOLS
            .get_or_init(Pools::default)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.get(&key) {
            return Ok(Arc::clone(pool));
        }
        let built = rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads)
            .thread_name(move |i| format!("{name}-{i}"))
            .build();
        built
            .map(|pool| Arc::clone(pools.entry(key).or_insert(Arc::new(pool))))
            .map_err(|error| {
                let message = format!("cannot start {n_threads} threads: {error}");
                Error::new(Kind::Io, message)
            })
    };
    raise(py, pool)
}
