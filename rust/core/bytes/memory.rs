#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "vector instructions that not every processor has"
    )
)]
//! Destination memory: allocation on huge pages, non-temporal stores, copies that compute a checksum, and loops with the
//! widest vectors of the processor.
//!
//! Page faults cost more than the copy itself. New destinations are therefore mapped on 2 MiB boundaries with the
//! advice to use huge pages, and the threads that fill them touch them first. Non-temporal stores avoid the read of
//! each line before it is overwritten.

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

/// Writes to every page of new memory, so that the system provides it. The content is lost.
pub(crate) fn touch(memory: &mut [u8]) {
    for page in memory.chunks_mut(rustix::param::page_size()) {
        page[0] = 1; // a page that is only read stays unallocated
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

/// Lines that [`copy_lines`] folds together.
#[cfg(target_arch = "x86_64")]
const FOLDED_LINES: usize = 3;

/// How far ahead of a copy its source is prefetched.
#[cfg(target_arch = "x86_64")]
const COPY_PREFETCH_BYTES: usize = 2048;

/// The same for a sum, which takes less time: 27 GB/s without prefetches, 27 at 2 KiB, 33 from 4 KiB on (AMD EPYC, two
/// threads).
#[cfg(target_arch = "x86_64")]
const SUM_PREFETCH_BYTES: usize = 8192;

/// Copies the first complete lines of a run and continues the state of a crc32c (the inverted checksum) with them, in
/// one pass: each byte is loaded once, stored and summed. Returns the number of bytes and the state, or `None` where
/// the processor cannot do it or the run is short.
#[cfg(target_arch = "x86_64")]
pub(crate) fn copy_lines(
    to: &mut [u8],
    from: &[u8],
    streams: bool,
    state: u32,
) -> Option<(usize, u32)> {
    let (to_lines, _) = to.as_chunks_mut::<64>();
    let (from_lines, _) = from.as_chunks::<64>();
    let n_lines = to_lines.len().min(from_lines.len()) / FOLDED_LINES * FOLDED_LINES;
    if n_lines < MIN_STREAMED_BYTES / 64 || !has_wide_multiplication() {
        return None;
    }
    let (to, from) = (&mut to_lines[..n_lines], &from_lines[..n_lines]);
    let state = if streams && to.as_ptr().cast::<u8>().align_offset(64) == 0 {
        // SAFETY: the processor has the instructions, as checked above; the stores are aligned to lines.
        unsafe { fold_lines::<true>(to, from, state) }
    } else {
        // SAFETY: the processor has the instructions, as checked above.
        unsafe { fold_lines::<false>(to, from, state) }
    };
    Some((n_lines * 64, state))
}

/// As [`copy_lines`], without a copy: of bytes that are in no cache, prefetched far ahead.
#[cfg(target_arch = "x86_64")]
pub(crate) fn sum_lines(from: &[u8], state: u32) -> Option<(usize, u32)> {
    let (lines, _) = from.as_chunks::<64>();
    let n_lines = lines.len() / FOLDED_LINES * FOLDED_LINES;
    if n_lines < MIN_STREAMED_BYTES / 64 || !has_wide_multiplication() {
        return None;
    }
    // SAFETY: the processor has the instructions, as checked above.
    let state = unsafe { fold_lines::<false>(&mut [], &lines[..n_lines], state) };
    Some((n_lines * 64, state))
}

/// Other processors copy block by block.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn copy_lines(_: &mut [u8], _: &[u8], _: bool, _: u32) -> Option<(usize, u32)> {
    None
}

/// Other processors sum by the crate.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn sum_lines(_: &[u8], _: u32) -> Option<(usize, u32)> {
    None
}

#[cfg(target_arch = "x86_64")]
fn has_wide_multiplication() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512vl")
        && std::arch::is_x86_feature_detected!("vpclmulqdq")
        && std::arch::is_x86_feature_detected!("sse4.2")
}

/// Copies lines and folds them into the state of a crc32c by carry-less multiplication; their number is a multiple of
/// [`FOLDED_LINES`]. With `STREAMS` the destination begins on a line boundary. An empty destination gets no copy.
///
/// A CRC is linear: bytes can be multiplied by x^n modulo the polynomial and added to those n bits later. Three lines
/// are folded into the next three until three are left; these are reduced to one, to 16 bytes, and to the state. The
/// algorithm and its constants are those of <https://github.com/corsix/fast-crc32> (`-i avx512_vpclmulqdq -p crc32c -a
/// v3x2`), which the crate `crc-fast` uses as well.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,vpclmulqdq,pclmulqdq,sse4.2")]
fn fold_lines<const STREAMS: bool>(to: &mut [[u8; 64]], from: &[[u8; 64]], state: u32) -> u32 {
    use std::arch::x86_64::{
        __m512i, _mm_crc32_u64, _mm_cvtsi32_si128, _mm_extract_epi64, _mm_set_epi64x,
        _mm_ternarylogic_epi64, _mm_xor_si128, _mm512_broadcast_i32x4, _mm512_castsi512_si128,
        _mm512_clmulepi64_epi128, _mm512_extracti32x4_epi32, _mm512_set_epi64,
        _mm512_ternarylogic_epi64, _mm512_xor_si512, _mm512_zextsi128_si512,
    };
    const XOR_OF_THREE: i32 = 0x96;
    // Bits by which lines are shifted: three lines, one line, and the 16-byte lanes of a line to its last one.
    let by_three = _mm512_broadcast_i32x4(_mm_set_epi64x(0xab7a_ff2a, 0xa87a_b8a8));
    let by_one = _mm512_broadcast_i32x4(_mm_set_epi64x(0x9e4a_ddf8, 0x740e_ef02));
    let by_lane = _mm512_set_epi64(
        0,
        0,
        0x493c_7d27,
        0xf20c_0dfe,
        0xba4f_c28e,
        0x3da6_d0cb,
        0xddc0_152b,
        0x1c29_1d04,
    );
    let fold = |sum: __m512i, by: __m512i, line: __m512i| {
        let low = _mm512_clmulepi64_epi128::<0>(sum, by);
        let high = _mm512_clmulepi64_epi128::<17>(sum, by);
        _mm512_ternarylogic_epi64::<XOR_OF_THREE>(low, high, line)
    };
    let (from_groups, _) = from.as_chunks::<FOLDED_LINES>();
    let (to_groups, _) = to.as_chunks_mut::<FOLDED_LINES>();
    let mut to_groups = to_groups.iter_mut();
    let mut groups = from_groups.iter();
    let Some(from) = groups.next() else {
        return state;
    };
    let mut take = |from: &[[u8; 64]; FOLDED_LINES]| match to_groups.next() {
        Some([to0, to1, to2]) => [
            copy_line::<STREAMS>(to0, &from[0]),
            copy_line::<STREAMS>(to1, &from[1]),
            copy_line::<STREAMS>(to2, &from[2]),
        ],
        None => [
            load_line::<SUM_PREFETCH_BYTES>(&from[0]),
            load_line::<SUM_PREFETCH_BYTES>(&from[1]),
            load_line::<SUM_PREFETCH_BYTES>(&from[2]),
        ],
    };
    let [x0, mut x1, mut x2] = take(from);
    let state = _mm512_zextsi128_si512(_mm_cvtsi32_si128(state.cast_signed()));
    let mut x0 = _mm512_xor_si512(x0, state);
    for from in groups {
        let [line0, line1, line2] = take(from);
        x0 = fold(x0, by_three, line0);
        x1 = fold(x1, by_three, line1);
        x2 = fold(x2, by_three, line2);
    }
    let line = fold(fold(x0, by_one, x1), by_one, x2);
    let low = _mm512_clmulepi64_epi128::<0>(line, by_lane);
    let high = _mm512_clmulepi64_epi128::<17>(line, by_lane);
    let lanes = _mm512_xor_si512(low, high);
    let three = _mm_ternarylogic_epi64::<XOR_OF_THREE>(
        _mm512_castsi512_si128(lanes),
        _mm512_extracti32x4_epi32::<1>(lanes),
        _mm512_extracti32x4_epi32::<2>(lanes),
    );
    let sixteen = _mm_xor_si128(three, _mm512_extracti32x4_epi32::<3>(line));
    let state = _mm_crc32_u64(0, _mm_extract_epi64::<0>(sixteen).cast_unsigned());
    _mm_crc32_u64(state, _mm_extract_epi64::<1>(sixteen).cast_unsigned()) as u32
}

/// Copies a line, and returns it. With `STREAMS` the destination is on a line boundary.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn copy_line<const STREAMS: bool>(
    to: &mut [u8; 64],
    from: &[u8; 64],
) -> std::arch::x86_64::__m512i {
    use std::arch::x86_64::{_mm512_storeu_si512, _mm512_stream_si512};
    let line = load_line::<COPY_PREFETCH_BYTES>(from);
    if STREAMS {
        debug_assert_eq!(to.as_ptr().align_offset(64), 0);
        // SAFETY: `to` is 64 writable bytes on a 64-byte boundary, as the caller checks.
        unsafe { _mm512_stream_si512(to.as_mut_ptr().cast(), line) };
    } else {
        // SAFETY: `to` is 64 writable bytes, and the store requires no alignment.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), line) };
    }
    line
}

/// Loads a line, and prefetches one that follows it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn load_line<const AHEAD_BYTES: usize>(from: &[u8; 64]) -> std::arch::x86_64::__m512i {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm512_loadu_si512};
    // Hardware prefetchers do not cross pages. A prefetch cannot fault, whatever the address.
    _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(AHEAD_BYTES).cast());
    // SAFETY: `from` is 64 readable bytes, and the load requires no alignment.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

/// A loop over slices that the compiler makes vector instructions of.
pub(crate) trait Vectorised {
    /// What it returns.
    type Output;

    /// Runs the loop. It and all that it calls are `#[inline(always)]`: other code is compiled for every processor.
    fn run(self) -> Self::Output;
}

/// Runs a loop with the widest vectors that this processor has. Those that every x86-64 processor has are of 16 bytes.
pub(crate) fn with_wide_vectors<L: Vectorised>(one: L) -> L::Output {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected;
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the processor has the instructions, as checked above; the function has no other requirement.
            return unsafe { with_avx512(one) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, as checked above; the function has no other requirement.
            return unsafe { with_avx2(one) };
        }
    }
    one.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn with_avx512<L: Vectorised>(one: L) -> L::Output {
    one.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<L: Vectorised>(one: L) -> L::Output {
    one.run()
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
