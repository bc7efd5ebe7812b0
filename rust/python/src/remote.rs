//! Objects in buckets and behind HTTP.

use crate::errors::raise;
use crate::records::{
    OBJECT_STATUS, REMOTE_COUNTS, UNFINISHED_UPLOAD, lifecycle_rule, put_new_member,
};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use reshard_core::checksum::Checksums;
use reshard_core::control::Control;
use reshard_core::{Error, Kind, Result};
use reshard_remote::address::Service;
use reshard_remote::folder::{self, Found};
use reshard_remote::object::{self, Object};
use reshard_remote::upload;
use reshard_remote::write::{self, PutNew};
use reshard_remote::{Address, Cache, Options};
use reshard_remote::{lifecycle, limit, unfinished};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How often signals are handled while a request waits.
const TICK: Duration = Duration::from_millis(50);
const ETIMEDOUT: i32 = 110;

/// Runs a request on a thread of its own, and handles signals meanwhile. An interrupted request ends by itself.
fn wait<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    wait_and(py, work, |_| Ok(()))
}

/// As [`wait`], and calls `tick` meanwhile, whose error is returned at once.
fn wait_and<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
    mut tick: impl FnMut(Python<'_>) -> PyResult<()>,
) -> PyResult<T> {
    let (sender, receiver) = channel();
    let end = limit::end();
    let started = std::thread::Builder::new()
        .name("reshard-request".to_owned())
        .spawn(move || {
            limit::set_end(end);
            sender.send(work())
        });
    started.map_err(|error| PyRuntimeError::new_err(format!("cannot start a thread: {error}")))?;
    // `Receiver` is not shared between threads: it moves in and comes back.
    let mut receiver = receiver;
    loop {
        let (found, back) = py.detach(move || (receiver.recv_timeout(TICK), receiver));
        receiver = back;
        match found {
            Ok(result) => return raise(py, result),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals()?;
                tick(py)?;
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("a request ended without a result"));
            }
        }
    }
}

fn address(py: Python<'_>, url: &str) -> PyResult<Address> {
    raise(py, Address::parse(url))
}

/// An opened object.
#[pyclass(module = "reshard._core", frozen)]
pub(crate) struct RemoteObject(Arc<Object>);

#[pymethods]
impl RemoteObject {
    #[new]
    fn new(py: Python<'_>, url: &str) -> PyResult<Self> {
        let address = address(py, url)?;
        wait(py, move || Object::open(&address)).map(|object| Self(Arc::new(object)))
    }

    #[getter]
    fn n_bytes(&self) -> u64 {
        self.0.n_bytes()
    }

    fn read<'py>(
        &self,
        py: Python<'py>,
        start: u64,
        n_bytes: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let object = Arc::clone(&self.0);
        let read = move || {
            let n = n_bytes.min(object.n_bytes().saturating_sub(start));
            let mut to = vec![0; n as usize];
            object.read_at(start, &mut to)?;
            Ok(to)
        };
        wait(py, read).map(|bytes| PyBytes::new(py, &bytes))
    }
}

/// What has a name. After `wait_s` no answer counts, and the request ends by itself.
#[pyfunction]
#[pyo3(signature = (url, *, wait_s=None))]
pub(crate) fn object_status<'py>(
    py: Python<'py>,
    url: &str,
    wait_s: Option<f64>,
) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let address = address(py, url)?;
    let begun = Instant::now();
    let in_time = |py: Python<'_>| match wait_s {
        Some(wait_s) if begun.elapsed().as_secs_f64() >= wait_s => {
            let message = format!("looking at {url}: no answer within {wait_s} s");
            raise(py, Err(Error::new(Kind::Io, message).errno(ETIMEDOUT)))
        }
        _ => Ok(()),
    };
    let found = wait_and(py, move || folder::stat(&address), in_time)?;
    found.map(|found| status_of(py, found)).transpose()
}

/// The size is `None` for a folder.
fn status_of(py: Python<'_>, found: Found) -> PyResult<Bound<'_, PyTuple>> {
    let values = match found {
        Found::Object {
            n_bytes,
            e_tag,
            modified,
        } => (Some(n_bytes), e_tag.unwrap_or_default(), modified),
        Found::Folder => (None, String::new(), 0),
    };
    OBJECT_STATUS.of(py, values)
}

type Named<'py> = (String, Bound<'py, PyTuple>);

fn named(
    py: Python<'_>,
    found: impl IntoIterator<Item = (String, Found)>,
) -> PyResult<Vec<Named<'_>>> {
    let found = found.into_iter();
    found
        .map(|(name, found)| Ok((name, status_of(py, found)?)))
        .collect()
}

#[pyfunction]
#[pyo3(signature = (url, max_pages=None))]
pub(crate) fn object_names<'py>(
    py: Python<'py>,
    url: &str,
    max_pages: Option<usize>,
) -> PyResult<(Vec<Named<'py>>, bool)> {
    let address = address(py, url)?;
    let max_pages = max_pages.unwrap_or(usize::MAX);
    let (found, is_complete) = wait(py, move || folder::entries(&address, max_pages))?;
    Ok((named(py, found)?, is_complete))
}

#[pyfunction]
pub(crate) fn read_small_object<'py>(
    py: Python<'py>,
    url: &str,
    max_bytes: u64,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let address = address(py, url)?;
    let content = wait(py, move || object::read_small(&address, max_bytes))?;
    Ok(content.map(|content| PyBytes::new(py, &content)))
}

#[pyfunction]
pub(crate) fn put_object(py: Python<'_>, url: &str, content: &[u8]) -> PyResult<()> {
    let (address, content) = (address(py, url)?, content.to_vec());
    wait(py, move || write::put(&address, content))
}

#[pyfunction]
#[pyo3(signature = (path, url, *, checksums=None, progress=None))]
pub(crate) fn upload_file(
    py: Python<'_>,
    path: PathBuf,
    url: &str,
    checksums: Option<(u64, Vec<u8>)>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<String>> {
    let address = address(py, url)?;
    // The header is part of the first chunks.
    let checksums = checksums.map(|(n_bytes, sums)| Checksums::from_bytes(n_bytes, 0, 0, &sums));
    let checksums = raise(py, checksums.transpose())?;
    let total = std::fs::metadata(&path).map_or(0, |found| found.len());
    let control = Arc::new(Control::default());
    let report = |py: Python<'_>| match progress {
        Some(call) => call.call1((control.done_bytes(), total)).map(drop),
        None => py.check_signals(),
    };
    let own = Arc::clone(&control);
    let work = move || upload::send_file(&path, &address, checksums.as_ref(), &own);
    wait_and(py, work, report).inspect_err(|_| control.cancel())
}

/// Begins an upload in parts of an object, for several processes.
#[pyfunction]
pub(crate) fn begin_upload(py: Python<'_>, url: &str) -> PyResult<String> {
    let address = address(py, url)?;
    wait(py, move || upload::begin_shared(&address))
}

/// Makes an object of the parts of an upload.
#[pyfunction]
#[pyo3(signature = (url, upload, n_bytes, parts, *, before=None))]
pub(crate) fn complete_upload(
    py: Python<'_>,
    url: &str,
    upload: String,
    n_bytes: u64,
    parts: Vec<String>,
    before: Option<String>,
) -> PyResult<Option<String>> {
    let address = address(py, url)?;
    wait(py, move || {
        upload::complete_shared(&address, n_bytes, &upload, parts, before.as_deref())
    })
}

/// Ends an upload in parts; no error if there is none.
#[pyfunction]
pub(crate) fn end_upload(py: Python<'_>, url: &str, upload: String) -> PyResult<()> {
    let address = address(py, url)?;
    wait(py, move || upload::end_shared(&address, &upload))
}

/// Lets the requests of this thread end in so many seconds; `None`: each as its bucket says.
#[pyfunction]
#[pyo3(signature = (seconds))]
pub(crate) fn limit_requests(seconds: Option<f64>) {
    let left = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    limit::set_end(left.map(|left| Instant::now() + left));
}

/// What became of the request, and why it is not known.
#[pyfunction]
pub(crate) fn put_new_object<'py>(
    py: Python<'py>,
    url: &str,
    content: &[u8],
) -> PyResult<(Bound<'py, PyAny>, Option<Py<PyAny>>)> {
    let (address, content) = (address(py, url)?, content.to_vec());
    let outcome = wait(py, move || write::put_new(&address, content))?;
    let member = put_new_member(py, &outcome)?;
    let reason = match outcome {
        PutNew::Unknown(error) => raise::<()>(py, Err(error)).err(),
        PutNew::Created | PutNew::Exists => None,
    };
    Ok((member, reason.map(|error| error.into_value(py).into_any())))
}

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "converted from a list")]
pub(crate) fn remove_objects(py: Python<'_>, urls: Vec<String>) -> PyResult<()> {
    let addresses = urls.iter().map(|url| address(py, url));
    let addresses = addresses.collect::<PyResult<Vec<_>>>()?;
    wait(py, move || write::remove(&addresses))
}

#[pyfunction]
#[pyo3(signature = (url, *, after="", max_keys=None))]
pub(crate) fn objects_below<'py>(
    py: Python<'py>,
    url: &str,
    after: &str,
    max_keys: Option<usize>,
) -> PyResult<Vec<Named<'py>>> {
    let (address, after) = (address(py, url)?, after.to_owned());
    let found = wait(py, move || folder::below(&address, &after, max_keys))?;
    named(py, found)
}

#[pyfunction]
#[pyo3(signature = (
    url, *, endpoint=None, region=None, anonymous=false, allow_http=false, retry_s=None, cache=None
))]
#[expect(clippy::too_many_arguments, reason = "the options of a bucket")]
pub(crate) fn set_bucket_options(
    py: Python<'_>,
    url: &str,
    endpoint: Option<String>,
    region: Option<String>,
    anonymous: bool,
    allow_http: bool,
    retry_s: Option<f64>,
    cache: Option<(PathBuf, u64)>,
) -> PyResult<()> {
    let retry_for = retry_s.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let options = Options {
        endpoint,
        region,
        anonymous,
        allow_http,
        retry_for,
        cache: cache_of(py, cache)?,
    };
    raise(
        py,
        reshard_remote::set_options(&address(py, url)?, &options),
    )
}

fn cache_of(py: Python<'_>, given: Option<(PathBuf, u64)>) -> PyResult<Option<Cache>> {
    let cache = given.map(|(folder, max_bytes)| Cache { folder, max_bytes });
    if let Some(cache) = &cache {
        raise(py, reshard_remote::cache::prepare(cache))?;
    }
    Ok(cache)
}

/// Keeps what is read of buckets in a folder, `(folder, max_bytes)`; `None`: nowhere.
#[pyfunction]
#[pyo3(signature = (cache))]
pub(crate) fn set_cache(py: Python<'_>, cache: Option<(PathBuf, u64)>) -> PyResult<()> {
    reshard_remote::set_cache(cache_of(py, cache)?);
    Ok(())
}

/// The unfinished uploads below URLs, or of one object, and why these are not all.
#[pyfunction]
#[pyo3(signature = (urls, *, is_file, wait_s))]
#[expect(
    clippy::needless_pass_by_value,
    reason = "an argument of a function of Python"
)]
pub(crate) fn unfinished_uploads(
    py: Python<'_>,
    urls: Vec<String>,
    is_file: bool,
    wait_s: f64,
) -> PyResult<(Vec<Bound<'_, PyTuple>>, Option<String>)> {
    let folders = urls.iter().map(|url| address(py, url));
    let folders = folders.collect::<PyResult<Vec<_>>>()?;
    let seconds = Duration::try_from_secs_f64(wait_s).unwrap_or_default();
    let listed = wait(py, move || {
        unfinished::unfinished(&folders, is_file, seconds)
    })?;
    let found = listed.found.into_iter();
    let found =
        found.map(|one| UNFINISHED_UPLOAD.of(py, (one.key, one.id, one.begun, one.n_bytes)));
    Ok((found.collect::<PyResult<_>>()?, listed.reason))
}

/// The rules of a bucket, and why they are not known.
#[pyfunction]
#[pyo3(signature = (url, *, wait_s))]
pub(crate) fn lifecycle_rules<'py>(
    py: Python<'py>,
    url: &str,
    wait_s: f64,
) -> PyResult<(Vec<Bound<'py, PyTuple>>, Option<String>)> {
    let address = address(py, url)?;
    let seconds = Duration::try_from_secs_f64(wait_s).unwrap_or_default();
    let listed = wait(py, move || lifecycle::rules(&address, seconds))?;
    let found = listed.found.into_iter();
    let found = found.map(|rule| lifecycle_rule(py, rule));
    Ok((found.collect::<PyResult<_>>()?, listed.reason))
}

/// Requests, failed ones, fetched bytes and wanted bytes of this process, and the last gap and number of requests at once.
#[pyfunction]
pub(crate) fn remote_counts(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
    let (n_requests, n_failed, fetched_bytes) = object::counts();
    let wanted_bytes = reshard_core::window::wanted_bytes();
    let (gap_bytes, n_at_once) = object::last_link();
    let counts = (
        n_requests,
        n_failed,
        fetched_bytes,
        wanted_bytes,
        gap_bytes,
        n_at_once,
    );
    REMOTE_COUNTS.of(py, counts)
}

/// The URL of an object for messages; the complete one is kept.
#[pyfunction]
pub(crate) fn shown_url(py: Python<'_>, url: &str) -> PyResult<String> {
    let address = address(py, url)?;
    if address.service == Service::Http {
        raise(py, reshard_remote::options::set_url(&address, url))?;
    }
    Ok(address.shown())
}
