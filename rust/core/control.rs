//! Progress and cancellation of long work, shared between the thread that waits for it and the threads that do it.

use crate::error::{Error, Kind, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counters of a running copy, and the request to cancel it.
#[derive(Debug, Default)]
pub struct Control {
    cancelled: AtomicBool,
    done_bytes: AtomicU64,
    fetched_bytes: AtomicU64,
}

impl Control {
    /// Asks the copy to stop at the next band.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Bytes of the destination that are filled.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that were fetched of the sources.
    pub fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn fetched(&self, n_bytes: u64) {
        self.fetched_bytes.fetch_add(n_bytes, Ordering::Relaxed);
    }

    pub(crate) fn advance(&self, n_bytes: u64) {
        self.done_bytes.fetch_add(n_bytes, Ordering::Relaxed);
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::new(Kind::Cancelled, "cancelled"));
        }
        Ok(())
    }
}
