#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "non-temporal stores are processor intrinsics")
)]
//! Destination memory: allocation on huge pages, and non-temporal stores.
//!
//! Page faults cost more than the copy itself. New destinations are therefore mapped on 2 MiB boundaries with the
//! advice to use huge pages, and the threads that fill them touch them first. Non-temporal stores avoid the read of
//! each line before it is overwritten. Whether that is faster depends on the processor: `tuning` measures it.

use crate::error::{Error, Kind, Result};
use memmap2::{MmapMut, MmapOptions};

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed anonymous memory. It uses huge pages if it is large enough and the system supports them.
#[derive(Debug)]
pub struct Memory {
    map: Option<MmapMut>,
    start: usize,
    len: usize,
}

impl Memory {
    /// Allocates memory of a size in bytes. Pages become resident when they are touched.
    pub fn new(len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self {
                map: None,
                start: 0,
                len,
            });
        }
        let huge = len >= HUGE_PAGE_BYTES;
        let map_len = len + if huge { HUGE_PAGE_BYTES } else { 0 };
        let map = MmapOptions::new()
            .len(map_len)
            .map_anon()
            .map_err(|error| {
                Error::new(Kind::Io, format!("cannot allocate {len} bytes: {error}"))
                    .hint("load fewer keys at a time, or pass your own buffers as `out=`")
            })?;
        let mut start = 0;
        if huge {
            start = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
            // A kernel without huge pages rejects the advice; the memory is usable all the same.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Self {
            map: Some(map),
            start,
            len,
        })
    }

    /// Excludes the memory from child processes that are forked later.
    pub fn exclude_from_fork(&self) {
        #[cfg(target_os = "linux")]
        if let Some(map) = &self.map {
            let _ = map.advise(memmap2::Advice::DontFork);
        }
    }

    /// The bytes, for reading.
    pub fn as_slice(&self) -> &[u8] {
        self.map
            .as_ref()
            .map_or(&[], |map| &map[self.start..self.start + self.len])
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.map
            .as_mut()
            .map_or(&mut [], |map| &mut map[self.start..self.start + self.len])
    }

    /// Address of the first byte; dangling if there are no bytes.
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

/// What a destination is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    /// New pages.
    Fresh,
    /// Memory that is read again soon: plain stores always, which keep it in the cache.
    Plain,
    /// Memory that is resident already, and read later.
    Streaming,
}

/// Shorter runs use plain stores: partial lines at their ends cost more than non-temporal stores save.
#[cfg(target_arch = "x86_64")]
const MIN_STREAMED_BYTES: usize = 1024;

/// Copies a run of bytes, with non-temporal stores if `streams`. Both slices have the same length.
pub fn copy_run(to: &mut [u8], from: &[u8], streams: bool) {
    #[cfg(target_arch = "x86_64")]
    if streams && to.len() >= MIN_STREAMED_BYTES && std::arch::is_x86_feature_detected!("avx") {
        assert_eq!(to.len(), from.len());
        // SAFETY: the processor has AVX, as checked above; the function has no other requirement.
        unsafe { stream_avx(to, from) };
        return;
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = streams;
    to.copy_from_slice(from);
}

/// Prefetches bytes that are read soon into the second-level cache.
///
/// Hardware prefetchers follow sequential reads but do not cross pages, so each of several short runs at a distance
/// would start with a cache miss. The first-level cache is not used because it supports too few outstanding lines.
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

/// Orders the non-temporal stores of this thread before its later stores.
pub fn finish_stores() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
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
        #[expect(clippy::cast_ptr_alignment, reason = "the load requires no alignment")]
        let source = from.as_ptr().cast::<__m256i>();
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "the head was split off at a line boundary"
        )]
        let target = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: `from` is 64 readable bytes and the load requires no alignment.
        let low = unsafe { _mm256_loadu_si256(source) };
        // SAFETY: 32 bytes further, still inside the 64 readable bytes.
        let high_at = unsafe { source.add(1) };
        // SAFETY: the last 32 of the 64 readable bytes; the load requires no alignment.
        let high = unsafe { _mm256_loadu_si256(high_at) };
        // SAFETY: `to` is 64 writable bytes on a 64-byte boundary (the head was split off), so on a 32-byte one.
        unsafe { _mm256_stream_si256(target, low) };
        // SAFETY: 32 bytes further, still inside the 64 writable bytes.
        let high_to = unsafe { target.add(1) };
        // SAFETY: the last 32 of the 64 writable bytes, on a 32-byte boundary.
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
            copy_run(&mut to[at..at + len], &from[1..=len], true);
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
