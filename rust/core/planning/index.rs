//! The index of the stored shards, and the plan of a request.
//!
//! For each key the index holds the stored tiles: symbolically if they form a grid, so that its size does not depend on
//! the number of ranks, and explicitly otherwise (see `stored`).
//!
//! A file is opened when a plan first needs it. The plan holds the opened file, so that it reads the file that was
//! checked.

mod alike;
mod files;
mod held;
mod planner;
mod runs;
mod table;
mod verification;

use crate::planning::stored::Stored;
pub use crate::planning::stored::cell_name;
use files::FileSlot;
pub use files::{Change, ReadChecksums};
pub use held::Held;
use std::collections::{HashMap, HashSet};
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use table::WholeFile;

/// Files and stored tensors.
#[derive(Debug, Default)]
pub struct Index {
    files: Vec<FileSlot>,
    tensors: Vec<Stored>,
    by_key: HashMap<Arc<str>, u32>,
    whole_files: Vec<WholeFile>,
    /// The last table of files that was seen to name files of the index: tensors of one layout share theirs.
    last_files: Option<Arc<[u32]>>,
    is_closed: AtomicBool,
    read_checksums: Option<ReadChecksums>,
    /// Keys of tensors that no plan casts.
    uncast: HashSet<Box<str>>,
}

impl Drop for Index {
    fn drop(&mut self) {
        let tables = (take(&mut self.tensors), take(&mut self.by_key));
        drop_large(tables.0.len(), tables);
    }
}

/// Frees a value beside the caller, if it consists of many parts: to free those of 100,000 tensors takes some 10
/// milliseconds.
pub fn drop_large<T: Send + 'static>(n_parts: usize, value: T) {
    const MANY: usize = 10_000;
    if n_parts >= MANY {
        // If no thread can be started, the function is dropped here, and the value with it.
        let _ = std::thread::Builder::new().spawn(move || drop(value));
    }
}

/// Tensors that one thread compares with the table of their file, or plans. More of them use the current pool.
pub const CHUNK_TENSORS: usize = 8192;

impl Index {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::{ThreadId, current};

    struct Freed(Sender<ThreadId>);

    impl Drop for Freed {
        fn drop(&mut self) {
            let _ = self.0.send(current().id());
        }
    }

    #[test]
    fn a_large_value_is_freed_by_another_thread() {
        for (n_parts, is_here) in [(9_999, true), (10_000, false)] {
            let (sender, receiver) = channel();
            drop_large(n_parts, Freed(sender));
            assert_eq!(receiver.recv().unwrap() == current().id(), is_here);
        }
    }
}
