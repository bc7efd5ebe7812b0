//! Snapshots: images of shard files in memory. The caller waits for the copy; the write runs in the background.
//!
//! An image is the complete file, header included, so that it is written from its memory without another copy. The
//! memory comes from a pool, because page faults cost more than the copy and a training run saves the same state
//! repeatedly.

use crate::checksum::Checksums;
use crate::control::Control;
use crate::error::{Error, Kind, Result};
use crate::memory::{Memory, Stores};
use crate::plan::Plan;
use crate::writer::{Content, Options, write_image};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Sizes are rounded up to a multiple of this, so that a state that grows slightly can reuse memory.
const ROUND_BYTES: u64 = 4 << 20;

/// A pool of memory for snapshots.
#[derive(Debug)]
pub struct Pool {
    max_free_bytes: u64,
    free: Mutex<Vec<Memory>>,
    /// The process that may use the memory; child processes do not inherit it.
    pid: u32,
}

impl Pool {
    /// Creates a pool that keeps at most `max_free_bytes` of unused memory.
    pub fn new(max_free_bytes: u64) -> Self {
        Self {
            max_free_bytes,
            free: Mutex::new(Vec::new()),
            pid: std::process::id(),
        }
    }

    /// Bytes of unused memory.
    pub fn free_bytes(&self) -> u64 {
        if self.pid != std::process::id() {
            return 0;
        }
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.iter().map(|memory| memory.len() as u64).sum()
    }

    /// Acquires the smallest free memory of one to two times the size, or allocates memory, with the matching kind of
    /// stores.
    fn acquire(&self, n_bytes: u64) -> Result<(Memory, Stores)> {
        let size = n_bytes.next_multiple_of(ROUND_BYTES) as usize;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free
            .iter()
            .enumerate()
            .filter(|(_, memory)| (size..=2 * size).contains(&memory.len()))
            .min_by_key(|(_, memory)| memory.len())
            .map(|(i, _)| i);
        if let Some(i) = fits {
            return Ok((free.swap_remove(i), Stores::Streaming));
        }
        drop(free);
        let memory = Memory::new(size)?;
        memory.exclude_from_fork();
        Ok((memory, Stores::Fresh))
    }

    fn release(&self, memory: Memory) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(memory);
        // The oldest memory is freed first.
        while free.iter().map(|memory| memory.len() as u64).sum::<u64>() > self.max_free_bytes {
            free.remove(0);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // A child process does not have this memory; its addresses may be in use for something else.
            let free = self.free.get_mut().unwrap_or_else(PoisonError::into_inner);
            free.drain(..).for_each(std::mem::forget);
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
        let (mut memory, stores) = pool.acquire(content.n_bytes())?;
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

    /// Writes the image; see [`crate::writer::write`]. The metadata of the options is ignored: the image contains it.
    ///
    /// # Errors
    /// As [`crate::writer::write`], or this is a child of the process that took the snapshot.
    pub fn write(&self, path: &Path, options: &Options, control: &Control) -> Result<Checksums> {
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
    use crate::dtype::Dtype;
    use crate::plan::MemoryTensor;

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
                name: "w".into(),
                dtype: Dtype::F32,
                shape: vec![n],
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
            let mut buffers = crate::writer::Buffers::new(16 << 20).unwrap();
            let path = folder.path().join("b");
            let written = crate::writer::write(&path, &plan, &options, &mut buffers, &control);
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
}
