//! Progress and cancellation, shared between the thread that waits for an operation and the threads that execute it.

use crate::error::{Error, Kind, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Byte counters of a running operation, and the request to cancel it.
#[derive(Debug, Default)]
pub struct Control {
    cancelled: AtomicBool,
    done_bytes: AtomicU64,
    fetched_bytes: AtomicU64,
}

impl Control {
    /// Requests cancellation. Workers stop at the next band.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Bytes of the destination that are filled so far.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that were fetched from the sources so far.
    pub fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn fetched(&self, n_bytes: u64) {
        self.fetched_bytes.fetch_add(n_bytes, Ordering::Relaxed);
    }

    /// Counts bytes as done.
    pub fn advance(&self, n_bytes: u64) {
        self.done_bytes.fetch_add(n_bytes, Ordering::Relaxed);
    }

    /// An error if cancellation was requested.
    ///
    /// # Errors
    /// [`Kind::Cancelled`]
    pub fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::new(Kind::Cancelled, "cancelled"));
        }
        Ok(())
    }
}
