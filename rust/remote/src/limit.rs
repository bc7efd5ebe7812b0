//! A limit of time for requests of one thread together, as for those of a clean-up.

use crate::client::runtime;
use object_store::client::{HttpError, HttpErrorKind};
use reshard_core::Result;
use std::cell::Cell;
use std::fmt;
use std::time::Instant;

thread_local! {
    static END: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// When requests of this thread end, whether or not there is an answer.
pub fn end() -> Option<Instant> {
    END.get()
}

/// Lets requests of this thread end at a time; `None`: each as its bucket says.
pub fn set_end(end: Option<Instant>) {
    END.set(end);
}

#[derive(Debug)]
struct NoTimeLeft;

impl fmt::Display for NoTimeLeft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no time is left")
    }
}

impl std::error::Error for NoTimeLeft {}

/// The answer to a request. One that has none in time is dropped.
pub(crate) fn answer_to<T>(
    request: impl Future<Output = object_store::Result<T>>,
) -> Result<object_store::Result<T>> {
    let Some(end) = end() else {
        return Ok(runtime()?.block_on(request));
    };
    let late = |_| object_store::Error::Generic {
        store: "any",
        source: Box::new(HttpError::new(HttpErrorKind::Timeout, NoTimeLeft)),
    };
    let answered = async { tokio::time::timeout_at(end.into(), request).await };
    Ok(runtime()?.block_on(answered).map_err(late).flatten())
}
