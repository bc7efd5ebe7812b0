//! The memory through which files are written.

use super::PIECE_BYTES;
use crate::bytes::memory::{Memory, touch};
use crate::error::{Error, Kind, Result};
use crate::write::route::Routes;
use std::sync::atomic::{AtomicBool, Ordering};

/// Enough for the full throughput of disks.
const PIECES_IN_FLIGHT: usize = 8;
/// Pieces whose memory is touched before a file is written. More would take the processors from what goes before it.
const PREPARED_PIECES: usize = 2;
/// How much new memory is touched before it is asked whether to stop: a huge page.
const TOUCHED_BYTES: usize = 2 << 20;
/// The smallest budget: one piece is filled while another is written.
pub const MIN_MEMORY_BYTES: u64 = 2 * PIECE_BYTES as u64;

/// The memory through which files are written: several pieces, within a budget.
///
/// It is reused for each file, because page faults cost more than filling the memory.
#[derive(Debug)]
pub struct Buffers {
    memory: Memory,
    /// How many bytes of the memory have pages, from its beginning.
    touched_bytes: usize,
    memory_bytes: u64,
    max_pieces: usize,
    routes: Routes,
}

impl Buffers {
    /// Creates buffers within a budget. Memory is allocated at the first write.
    pub fn new(memory_bytes: u64) -> Result<Self> {
        if memory_bytes < MIN_MEMORY_BYTES {
            let message = format!(
                "a memory budget of {memory_bytes} bytes is too small; expected at least {MIN_MEMORY_BYTES}"
            );
            return Err(Error::new(Kind::Argument, message));
        }
        Ok(Self {
            memory: Memory::new(0)?,
            touched_bytes: 0,
            memory_bytes,
            max_pieces: (memory_bytes / PIECE_BYTES as u64).min(PIECES_IN_FLIGHT as u64) as usize,
            routes: Routes::default(),
        })
    }

    /// The budget.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Touches memory for the first pieces of a file of this size, before it is written, until `stop` is set.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub fn touch(&mut self, n_bytes: u64, stop: &AtomicBool) -> Result<()> {
        let end = self.allocate(n_bytes)?.min(PREPARED_PIECES) * PIECE_BYTES;
        while self.touched_bytes < end && !stop.load(Ordering::Relaxed) {
            let start = self.touched_bytes;
            self.touched_bytes = (start + TOUCHED_BYTES).min(end);
            touch(&mut self.memory.as_mut_slice()[start..self.touched_bytes]);
        }
        Ok(())
    }

    /// Allocates memory for a file of this size. Returns the number of its pieces.
    fn allocate(&mut self, n_bytes: u64) -> Result<usize> {
        let n = n_in_flight(n_bytes).min(self.max_pieces);
        if self.memory.len() < n * PIECE_BYTES {
            // The complete budget is allocated at once, so that files of growing sizes do not reallocate.
            let n = if n > 1 { self.max_pieces } else { 1 };
            self.memory = Memory::new(n * PIECE_BYTES)?;
            self.touched_bytes = 0;
        }
        Ok(n)
    }

    /// Buffers of one piece each, as many as a file of this size uses, at most `n_at_once`, and the routes of its pieces. From now on they
    /// count as touched.
    pub(super) fn for_file(
        &mut self,
        n_bytes: u64,
        n_at_once: usize,
    ) -> Result<(Vec<Buffer<'_>>, &Routes)> {
        let n = self.allocate(n_bytes)?.min(n_at_once);
        let touched_bytes = self.touched_bytes;
        self.touched_bytes = touched_bytes.max(n * PIECE_BYTES);
        let pieces = self.memory.as_mut_slice().chunks_mut(PIECE_BYTES);
        let buffers = pieces.take(n).enumerate().map(|(i, memory)| Buffer {
            touched_bytes: touched_bytes
                .saturating_sub(i * PIECE_BYTES)
                .min(memory.len()),
            memory,
        });
        Ok((buffers.collect(), &self.routes))
    }
}

/// Memory for one piece.
#[derive(Default)]
pub(super) struct Buffer<'a> {
    pub(super) memory: &'a mut [u8],
    /// How many of its bytes have pages, from its beginning.
    pub(super) touched_bytes: usize,
}

pub(super) fn n_in_flight(n_bytes: u64) -> usize {
    n_bytes
        .div_ceil(PIECE_BYTES as u64)
        .min(PIECES_IN_FLIGHT as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn touched(buffers: &mut Buffers, n_bytes: u64) -> Vec<usize> {
        let (pieces, _) = buffers.for_file(n_bytes, usize::MAX).unwrap();
        pieces.iter().map(|one| one.touched_bytes >> 20).collect()
    }

    #[test]
    fn memory_is_touched_once() {
        let new = || Buffers::new(16 * MIB).unwrap();
        let (go, stop) = (AtomicBool::new(false), AtomicBool::new(true));
        let mut buffers = new();
        assert_eq!(touched(&mut buffers, 5 * MIB), [0, 0]);
        assert_eq!(touched(&mut buffers, 90 * MIB), [4, 4, 0, 0]);
        assert_eq!(touched(&mut buffers, 90 * MIB), [4, 4, 4, 4]);
        let mut buffers = new();
        buffers.touch(90 * MIB, &stop).unwrap();
        assert_eq!(touched(&mut buffers, 90 * MIB), [0, 0, 0, 0]);
        let mut buffers = new();
        buffers.touch(90 * MIB, &go).unwrap();
        buffers.touch(90 * MIB, &stop).unwrap();
        assert_eq!(touched(&mut buffers, 90 * MIB), [4, 4, 0, 0]);
        // A file of one piece has memory of one piece, which is replaced.
        let mut buffers = new();
        assert_eq!(touched(&mut buffers, MIB), [0]);
        assert_eq!(touched(&mut buffers, 90 * MIB), [0, 0, 0, 0]);
    }
}
