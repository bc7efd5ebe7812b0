#![expect(unsafe_code, reason = "non-temporal stores are processor intrinsics")]
//! Destination memory: fresh pages on huge pages, and stores that do not pollute the cache.
//!
//! Page faults cost more than the copy itself, so fresh destinations are mapped on 2 MiB boundaries and advised to be
//! huge; their first touch is left to the threads that fill them. Into memory that is warm already, non-temporal
//! stores save the read of every line that is about to be overwritten; into fresh pages they lose.

use crate::error::{Error, Kind, Result};
use memmap2::{MmapMut, MmapOptions};

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed anonymous memory, on huge pages where it is large enough and the system offers them.
#[derive(Debug)]
pub struct Memory {
    map: Option<MmapMut>,
    start: usize,
    len: usize,
}

impl Memory {
    /// Memory of a size; it becomes resident when it is touched.
    pub fn new(len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self {
                map: None,
                start: 0,
                len,
            });
        }
        let huge = len >= HUGE_PAGE_BYTES;
        let room = len + if huge { HUGE_PAGE_BYTES } else { 0 };
        let map = MmapOptions::new().len(room).map_anon().map_err(|error| {
            Error::new(Kind::Io, format!("cannot allocate {len} bytes: {error}"))
                .hint("load fewer keys at a time, or give your own buffers with `out=`")
        })?;
        let mut start = 0;
        if huge {
            start = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
            // Advice that a kernel without huge pages refuses costs nothing but speed.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Self {
            map: Some(map),
            start,
            len,
        })
    }

    /// Keeps the memory out of children that are forked from now on: their parent goes on using it.
    pub fn not_for_children(&self) {
        #[cfg(target_os = "linux")]
        if let Some(map) = &self.map {
            let _ = map.advise(memmap2::Advice::DontFork);
        }
    }

    /// The bytes, to read.
    pub fn as_slice(&self) -> &[u8] {
        self.map
            .as_ref()
            .map_or(&[], |map| &map[self.start..self.start + self.len])
    }

    /// The bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.map
            .as_mut()
            .map_or(&mut [], |map| &mut map[self.start..self.start + self.len])
    }

    /// Address of the first byte, for export; dangling when empty.
    pub fn as_ptr(&self) -> *const u8 {
        self.map
            .as_ref()
            .map_or(std::ptr::dangling(), |map| map[self.start..].as_ptr())
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// How a destination is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// Fresh pages: plain stores, in runs as long as they come.
    Fresh,
    /// Memory whose content is used at once: plain stores, which leave it in the cache.
    Plain,
    /// Memory that is resident already: non-temporal stores for long runs.
    Streaming,
}

/// Shorter runs stay with plain stores: the partial lines at their ends would cost more than is saved.
const MIN_STREAMED_BYTES: usize = 1024;

/// Copies a run; both have the same length.
pub fn copy_run(to: &mut [u8], from: &[u8], stores: Stores) {
    #[cfg(target_arch = "x86_64")]
    if stores == Stores::Streaming
        && to.len() >= MIN_STREAMED_BYTES
        && std::arch::is_x86_feature_detected!("avx")
    {
        assert_eq!(to.len(), from.len());
        // SAFETY: the processor has AVX, as just asked; the function has no other requirement.
        unsafe { stream_avx(to, from) };
        return;
    }
    to.copy_from_slice(from);
}

/// Asks for bytes that will be read soon to be brought into the second-level cache.
///
/// Processors foresee what is read in order, but not across pages: of short runs that lie apart, each would begin with a wait
/// for memory. Into the first level it would not pay: too few lines can be on their way there.
pub fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: SSE is part of x86-64; a prefetch changes nothing and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Makes the non-temporal stores of this thread visible before what it does next, as other threads see it.
pub fn finish_stores(stores: Stores) {
    #[cfg(target_arch = "x86_64")]
    if stores == Stores::Streaming {
        // SAFETY: SSE is part of x86-64.
        unsafe { std::arch::x86_64::_mm_sfence() };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = stores;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
fn stream_avx(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    const LINE: usize = 64;
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let (to_head, to_rest) = to.split_at_mut(head);
    let (from_head, from_rest) = from.split_at(head);
    to_head.copy_from_slice(from_head);
    let (to_lines, to_tail) = to_rest.as_chunks_mut::<LINE>();
    let (from_lines, from_tail) = from_rest.as_chunks::<LINE>();
    for (to, from) in to_lines.iter_mut().zip(from_lines) {
        #[expect(clippy::cast_ptr_alignment, reason = "the load asks for no alignment")]
        let source = from.as_ptr().cast::<__m256i>();
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "the head was split off up to a line"
        )]
        let target = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: `from` is 64 readable bytes and the load asks for no alignment.
        let low = unsafe { _mm256_loadu_si256(source) };
        // SAFETY: 32 bytes on, the second half of the 64 readable bytes.
        let high_at = unsafe { source.add(1) };
        // SAFETY: the last 32 of the 64 readable bytes; the load asks for no alignment.
        let high = unsafe { _mm256_loadu_si256(high_at) };
        // SAFETY: `to` is 64 writable bytes on a 64-byte boundary (the head was split off), so on a 32-byte one.
        unsafe { _mm256_stream_si256(target, low) };
        // SAFETY: 32 bytes on, the second half of the 64 writable bytes.
        let high_to = unsafe { target.add(1) };
        // SAFETY: the last 32 of the 64 writable bytes, again on a 32-byte boundary.
        unsafe { _mm256_stream_si256(high_to, high) };
    }
    to_tail.copy_from_slice(from_tail);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_copies_every_length_and_alignment() {
        let from: Vec<u8> = (0..6000_u32).map(|i| (i % 251) as u8).collect();
        for (at, len) in [
            (0, 1024),
            (1, 1025),
            (63, 4097),
            (64, 2048),
            (7, 5000),
            (3, 10),
        ] {
            let mut to = vec![0_u8; 6200];
            copy_run(&mut to[at..at + len], &from[1..=len], Stores::Streaming);
            assert_eq!(&to[at..at + len], &from[1..=len]);
            assert!(to[..at].iter().chain(&to[at + len..]).all(|b| *b == 0));
        }
    }

    #[test]
    fn fresh_memory_is_zero_and_aligned() {
        let mut memory = Memory::new(5 << 20).unwrap();
        assert_eq!(memory.as_ptr() as usize % HUGE_PAGE_BYTES, 0);
        assert!(memory.as_mut_slice().iter().all(|b| *b == 0));
        assert!(Memory::new(0).unwrap().is_empty());
    }
}
