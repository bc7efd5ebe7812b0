//! Snapshots: images of shard files in memory. The caller waits for the copy; the write runs in the background.
//!
//! An image is the complete file, header included, so that it is written from its memory without another copy. The
//! memory comes from a pool, because page faults cost more than the copy and a training run saves the same state
//! repeatedly. Memory for the first save can be reserved: a thread allocates and touches it before it is needed.

use crate::bytes::memory::{Memory, Stores, touch};
use crate::control::Control;
use crate::error::{Error, Kind, Result};
use crate::planning::plan::Plan;
use crate::write::writer::{Content, Options, Written, write_image};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Sizes are rounded up to a multiple of this, so that a state that grows slightly can reuse memory.
const ROUND_BYTES: u64 = 4 << 20;
/// How often a thread that waits for reserved memory asks whether to stop.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// More threads do not clear memory faster.
const MAX_TOUCHING_THREADS: usize = 8;

/// A pool of memory for snapshots.
#[derive(Debug)]
pub struct Pool {
    max_free_bytes: u64,
    unused: Mutex<Unused>,
    /// Notified when memory that was reserved has come.
    has_come: Condvar,
    /// The process that may use the memory; child processes do not inherit it.
    pid: u32,
}

#[derive(Debug, Default)]
struct Unused {
    free: Vec<Memory>,
    /// Sizes of the memory that is being touched.
    coming: Vec<usize>,
}

impl Pool {
    /// Creates a pool that keeps at most `max_free_bytes` of unused memory.
    pub fn new(max_free_bytes: u64) -> Self {
        Self {
            max_free_bytes,
            unused: Mutex::default(),
            has_come: Condvar::new(),
            pid: std::process::id(),
        }
    }

    /// Bytes of unused memory.
    pub fn free_bytes(&self) -> u64 {
        if self.pid != std::process::id() {
            return 0;
        }
        total_bytes(&self.unused().free)
    }

    /// Allocates and touches memory in the background, so that images of these sizes in bytes find memory. What is free
    /// or coming already counts; an image that is taken before its memory has come waits for it.
    pub fn reserve(self: &Arc<Self>, image_bytes: &[u64]) {
        if self.pid != std::process::id() {
            return;
        }
        let mut unused = self.unused();
        let mut known: Vec<usize> = unused.free.iter().map(Memory::len).collect();
        known.extend(&unused.coming);
        let mut missing = Vec::new();
        for n_bytes in image_bytes {
            let size = rounded(*n_bytes);
            if size == 0 {
                continue;
            }
            match smallest_fit(known.iter().copied(), size) {
                Some(i) => {
                    known.swap_remove(i);
                }
                None => missing.push(size),
            }
        }
        unused.coming.extend(&missing);
        drop(unused);
        let pool = Arc::clone(self);
        let sizes = missing.clone();
        let touch = move || {
            for size in sizes {
                // Without memory the save that needs it reports the error.
                let memory = touched(size);
                pool.come(size, memory.ok());
            }
        };
        let thread = std::thread::Builder::new().name("reshard memory".into());
        if thread.spawn(touch).is_err() {
            for size in missing {
                self.come(size, None);
            }
        }
    }

    /// Adds memory that was reserved.
    fn come(&self, size: usize, memory: Option<Memory>) {
        let mut unused = self.unused();
        if let Some(i) = unused.coming.iter().position(|other| *other == size) {
            unused.coming.swap_remove(i);
        }
        unused.free.extend(memory);
        self.shrink(unused);
        self.has_come.notify_all();
    }

    /// Acquires the smallest free memory of one to two times the size, or allocates memory, with the matching kind of
    /// stores.
    ///
    /// # Errors
    /// The memory cannot be allocated, or the run was cancelled.
    fn acquire(&self, n_bytes: u64, control: &Control) -> Result<(Memory, Stores)> {
        let size = rounded(n_bytes);
        let mut unused = self.unused();
        loop {
            if let Some(i) = smallest_fit(unused.free.iter().map(Memory::len), size) {
                return Ok((unused.free.swap_remove(i), Stores::Streaming));
            }
            if smallest_fit(unused.coming.iter().copied(), size).is_none() {
                break;
            }
            control.check()?;
            let waited = self.has_come.wait_timeout(unused, CHECK_INTERVAL);
            unused = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(unused);
        let memory = Memory::new(size)?;
        memory.exclude_from_fork();
        Ok((memory, Stores::Fresh))
    }

    fn release(&self, memory: Memory) {
        let mut unused = self.unused();
        unused.free.push(memory);
        self.shrink(unused);
    }

    /// Frees the oldest memory first.
    fn shrink(&self, mut unused: MutexGuard<'_, Unused>) {
        while total_bytes(&unused.free) > self.max_free_bytes {
            unused.free.remove(0);
        }
    }

    fn unused(&self) -> MutexGuard<'_, Unused> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn rounded(n_bytes: u64) -> usize {
    n_bytes.next_multiple_of(ROUND_BYTES) as usize
}

/// The position of the smallest of one to two times a size.
fn smallest_fit(sizes: impl Iterator<Item = usize>, size: usize) -> Option<usize> {
    let fits = sizes
        .enumerate()
        .filter(|(_, other)| (size..=2 * size).contains(other));
    fits.min_by_key(|(_, other)| *other).map(|(i, _)| i)
}

fn total_bytes(free: &[Memory]) -> u64 {
    free.iter().map(|memory| memory.len() as u64).sum()
}

/// New memory, all of it resident.
fn touched(size: usize) -> Result<Memory> {
    let mut memory = Memory::new(size)?;
    memory.exclude_from_fork();
    let n_threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let part = size.div_ceil(n_threads.min(MAX_TOUCHING_THREADS));
    std::thread::scope(|scope| {
        for part in memory.as_mut_slice().chunks_mut(part) {
            // Without a thread the part is touched by the copy.
            let _ = std::thread::Builder::new().spawn_scoped(scope, || touch(part));
        }
    });
    Ok(memory)
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // A child process does not have this memory; its addresses may be in use for something else.
            let unused = self.unused.get_mut();
            let unused = unused.unwrap_or_else(PoisonError::into_inner);
            unused.free.drain(..).for_each(std::mem::forget);
        }
    }
}

/// The image of one shard file.
#[derive(Debug)]
pub struct Snapshot {
    memory: Option<Memory>,
    n_bytes: u64,
    header_bytes: u64,
    pool: Arc<Pool>,
}

impl Snapshot {
    /// Copies the arrays of a plan on the current rayon pool.
    ///
    /// # Errors
    /// The header cannot be built, memory cannot be allocated, the pool belongs to a parent process, or the run was
    /// cancelled.
    pub fn take(
        pool: &Arc<Pool>,
        plan: &Plan<'_>,
        metadata: &[(String, String)],
        control: &Control,
    ) -> Result<Self> {
        check_process(pool)?;
        let content = Content::new(plan, metadata)?;
        let (mut memory, stores) = pool.acquire(content.n_bytes(), control)?;
        let image = &mut memory.as_mut_slice()[..content.n_bytes() as usize];
        let filled = content.fill(0, image, stores, control);
        let this = Self {
            memory: Some(memory),
            n_bytes: content.n_bytes(),
            header_bytes: content.header_bytes(),
            pool: Arc::clone(pool),
        };
        filled.map(|()| this)
    }

    /// Size of the file in bytes.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Writes the image; see [`crate::write::writer::write`]. The metadata of the options is ignored: the image contains it.
    ///
    /// # Errors
    /// As [`crate::write::writer::write`], or this is a child of the process that took the snapshot.
    pub fn write(&self, path: &Path, options: &Options, control: &Control) -> Result<Written> {
        check_process(&self.pool)?;
        let memory = self.memory.as_ref().expect("only drop takes the memory");
        let image = &memory.as_slice()[..self.n_bytes as usize];
        write_image(path, image, self.header_bytes, options, control)
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        if self.pool.pid == std::process::id() {
            self.pool.release(memory);
        } else {
            std::mem::forget(memory);
        }
    }
}

fn check_process(pool: &Pool) -> Result<()> {
    if pool.pid == std::process::id() {
        return Ok(());
    }
    let message = format!(
        "this snapshot belongs to process {}, the parent of this process",
        pool.pid
    );
    Err(Error::new(Kind::Argument, message).hint("save in the process that started the save"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::dtype::Dtype;
    use crate::planning::plan::MemoryTensor;

    #[test]
    fn a_snapshot_equals_a_written_file_and_its_memory_is_reused() {
        let folder = tempfile::tempdir().unwrap();
        let pool = Arc::new(Pool::new(64 << 20));
        let options = Options {
            metadata: vec![("format".into(), "pt".into())],
            container: None,
            durable: false,
            direct: true,
            mode: 0o600,
        };
        for n in [3_u64, 2_500_000, 2_000_000] {
            let bytes: Vec<u8> = (0..n * 4).map(|i| (i % 251) as u8).collect();
            let tensors = vec![MemoryTensor {
                name: "w",
                dtype: Dtype::F32,
                shape: std::slice::from_ref(&n),
                bytes: &bytes,
                strides_bytes: vec![4],
            }];
            let plan = Plan::of_memory(tensors).unwrap();
            let control = Control::default();
            let snapshot = Snapshot::take(&pool, &plan, &options.metadata, &control).unwrap();
            let taken = snapshot
                .write(&folder.path().join("a"), &options, &control)
                .unwrap();
            drop(snapshot);
            let mut buffers = crate::write::writer::Buffers::new(16 << 20).unwrap();
            let path = folder.path().join("b");
            let written =
                crate::write::writer::write(&path, &plan, &options, &mut buffers, &control);
            assert_eq!(taken, written.unwrap());
            let image = std::fs::read(folder.path().join("a")).unwrap();
            assert_eq!(image, std::fs::read(path).unwrap());
            assert!(
                taken.n_chunks() > 0
                    && (0..taken.n_chunks()).all(|i| {
                        let (at, len) = taken.chunk(i);
                        taken.matches(i, &image[at as usize..at as usize + len])
                    })
            );
        }
        // 4 MiB for the small snapshot, and 12 MiB for the large one and the last one.
        assert_eq!(pool.free_bytes(), 16 << 20);
    }

    #[test]
    fn reserved_memory_is_waited_for_and_reserved_once() {
        let pool = Arc::new(Pool::new(u64::MAX));
        for _ in 0..2 {
            pool.reserve(&[0, 5 << 20, 5 << 20, 1 << 20]); // the second time nothing is missing
        }
        let found: Vec<_> = (0..4)
            .map(|_| pool.acquire(5 << 20, &Control::default()).unwrap())
            .collect();
        let reserved: Vec<_> = found.iter().map(|(_, stores)| *stores).collect();
        let (fresh, streaming) = (Stores::Fresh, Stores::Streaming);
        assert_eq!(reserved, [streaming, streaming, fresh, fresh]);
        assert_eq!(pool.acquire(1, &Control::default()).unwrap().1, streaming);
    }

    #[test]
    fn a_thread_that_waits_for_memory_can_be_stopped() {
        let (pool, control) = (Arc::new(Pool::new(u64::MAX)), Control::default());
        pool.unused().coming.push(8 << 20); // never comes
        control.cancel();
        let error = pool.acquire(8 << 20, &control).unwrap_err();
        assert_eq!(error.kind(), Kind::Cancelled);
    }

    #[test]
    fn a_reservation_without_memory_ends() {
        let pool = Arc::new(Pool::new(u64::MAX));
        pool.reserve(&[1 << 60, 1 << 20]);
        assert!(pool.acquire(1 << 60, &Control::default()).is_err());
        assert_eq!(
            pool.acquire(1, &Control::default()).unwrap().1,
            Stores::Streaming
        );
    }
}
