//! crc32c of the 256 KiB chunks of a shard file: computed while the file is written, compared while it is read.
//!
//! Chunks are counted from the first byte of the file, header included. A CRC detects every burst error of up to 32
//! bits and every error of up to 3 bits in a chunk. It does not protect against deliberate changes.

use crate::bytes::memory::{copy_lines, copy_run, sum_lines};
use crate::error::{Error, Kind, Result};
use crc_fast::{CrcAlgorithm, Digest};
use std::sync::OnceLock;

/// Bytes of a chunk; the last chunk of a file may be shorter.
pub const CHUNK_BYTES: usize = 256 << 10;

/// Computes the crc32c of bytes, continued from `before`, the crc32c of the preceding bytes (0 at the start).
pub fn crc32c(before: u32, bytes: &[u8]) -> u32 {
    // The state of the crate is the CRC before its last step, which inverts it.
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!before));
    digest.update(bytes);
    digest.finalize() as u32
}

/// As [`crc32c`], faster for bytes that are in no cache.
pub(crate) fn crc32c_of_memory(before: u32, bytes: &[u8]) -> u32 {
    let (n, state) = sum_lines(bytes, !before).unwrap_or((0, !before));
    crc32c(!state, &bytes[n..])
}

/// Bytes that are summed and then copied out of the first-level cache, where the processor cannot do both at once. A
/// multiple of what the sum processes at once.
const BLOCK_BYTES: usize = 12 << 10;

/// Copies a run of bytes, with non-temporal stores if `streams`, and computes the crc32c of the bytes that were copied,
/// continued from `before`. Both slices have the same length.
pub fn copy_summed(mut before: u32, to: &mut [u8], from: &[u8], streams: bool) -> u32 {
    assert_eq!(to.len(), from.len());
    let head = to.as_ptr().align_offset(64).min(to.len());
    let (to_head, to) = to.split_at_mut(head);
    let (from_head, from) = from.split_at(head);
    to_head.copy_from_slice(from_head);
    before = crc32c(before, from_head);
    let (n, state) = copy_lines(to, from, streams, !before).unwrap_or((0, !before));
    before = !state;
    for (to, from) in to[n..]
        .chunks_mut(BLOCK_BYTES)
        .zip(from[n..].chunks(BLOCK_BYTES))
    {
        before = crc32c(before, from);
        copy_run(to, from, streams);
    }
    before
}

/// The expected size and checksums of a shard file. The checksums of the chunks can be given later: a file of 10 GB has
/// 160 KB of them, and a plan uses a part of the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checksums {
    n_bytes: u64,
    header_bytes: u64,
    header_checksum: u32,
    chunks: OnceLock<Vec<u32>>,
}

impl Checksums {
    /// Checksums of a file of `n_bytes` bytes; the first `header_bytes` bytes precede the data.
    ///
    /// # Errors
    /// The number of checksums is not the number of chunks, or the header is larger than the file.
    pub fn new(
        n_bytes: u64,
        header_bytes: u64,
        header_checksum: u32,
        chunks: Vec<u32>,
    ) -> Result<Self> {
        let this = Self::without_chunks(n_bytes, header_bytes, header_checksum)?;
        this.set_chunks(chunks)?;
        Ok(this)
    }

    /// The size and the header of a file whose chunks have checksums that are not read yet.
    ///
    /// # Errors
    /// The header is larger than the file.
    pub fn without_chunks(n_bytes: u64, header_bytes: u64, header_checksum: u32) -> Result<Self> {
        if header_bytes > n_bytes {
            let message =
                format!("{header_bytes} header bytes do not match a file of {n_bytes} bytes");
            return Err(Error::new(Kind::Argument, message));
        }
        Ok(Self {
            n_bytes,
            header_bytes,
            header_checksum,
            chunks: OnceLock::new(),
        })
    }

    fn set_chunks(&self, chunks: Vec<u32>) -> Result<()> {
        if self.n_bytes.div_ceil(CHUNK_BYTES as u64) != chunks.len() as u64 {
            let message = format!(
                "{} checksums do not match a file of {} bytes",
                chunks.len(),
                self.n_bytes
            );
            return Err(Error::new(Kind::Argument, message));
        }
        // Another thread may have read the same.
        let _ = self.chunks.set(chunks);
        Ok(())
    }

    /// Takes the checksums of the chunks from what was read later of the same file.
    ///
    /// # Errors
    /// It is of another file, or has no checksums either.
    pub fn complete(&self, read: Self) -> Result<()> {
        let is_same = self.n_bytes == read.n_bytes
            && self.header_bytes == read.header_bytes
            && self.header_checksum == read.header_checksum;
        match read.chunks.into_inner() {
            Some(chunks) if is_same => self.set_chunks(chunks),
            _ => Err(Error::damaged(
                "the checksums are of a file with another size or header",
            )),
        }
    }

    /// Whether the checksums of the chunks are known.
    pub fn has_chunks(&self) -> bool {
        self.chunks.get().is_some()
    }

    /// Decodes stored checksums: 4 bytes each, little-endian.
    ///
    /// # Errors
    /// As [`Self::new`], or the number of bytes is not a multiple of 4.
    pub fn from_bytes(
        n_bytes: u64,
        header_bytes: u64,
        header_checksum: u32,
        checksums: &[u8],
    ) -> Result<Self> {
        let (chunks, rest) = checksums.as_chunks::<4>();
        if !rest.is_empty() {
            let message = format!(
                "{} bytes of checksums are not a multiple of 4",
                checksums.len()
            );
            return Err(Error::new(Kind::Argument, message));
        }
        let chunks = chunks
            .iter()
            .map(|bytes| u32::from_le_bytes(*bytes))
            .collect();
        Self::new(n_bytes, header_bytes, header_checksum, chunks)
    }

    /// Encodes the checksums as they are stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let chunks = self.chunks.get().into_iter().flatten();
        chunks.flat_map(|checksum| checksum.to_le_bytes()).collect()
    }

    /// Size of the file.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Bytes before the data.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// crc32c of the bytes before the data.
    pub fn header_checksum(&self) -> u32 {
        self.header_checksum
    }

    /// Number of chunks.
    pub fn n_chunks(&self) -> usize {
        self.n_bytes.div_ceil(CHUNK_BYTES as u64) as usize
    }

    /// First byte and length of a chunk, in bytes.
    pub fn chunk(&self, number: usize) -> (u64, usize) {
        let start = (number * CHUNK_BYTES) as u64;
        (
            start,
            (self.n_bytes - start).min(CHUNK_BYTES as u64) as usize,
        )
    }

    /// The chunks that contain a byte of a range.
    pub fn chunks_over(&self, start: u64, len: u64) -> std::ops::Range<usize> {
        if len == 0 {
            return 0..0;
        }
        let chunk = CHUNK_BYTES as u64;
        (start / chunk) as usize..(start + len).div_ceil(chunk) as usize
    }

    /// First byte and length of the chunks that contain a byte of a range, which is not empty.
    pub fn span_of_chunks(&self, start: u64, len: u64) -> (u64, u64) {
        let chunks = self.chunks_over(start, len);
        let (first, _) = self.chunk(chunks.start);
        let (last, last_len) = self.chunk(chunks.end - 1);
        (first, last - first + last_len as u64)
    }

    /// Whether the bytes of a chunk match its checksum.
    pub fn matches(&self, number: usize, bytes: &[u8]) -> bool {
        self.is(number, crc32c(0, bytes))
    }

    /// Whether a chunk has this checksum. False while the checksums are not known: a plan that verifies reads them first.
    pub fn is(&self, number: usize, checksum: u32) -> bool {
        self.chunks
            .get()
            .is_some_and(|chunks| checksum == chunks[number])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summed_copy_has_the_bytes_and_the_sum_of_the_source() {
        let from: Vec<u8> = (0..70_000_u64).map(|i| (i * i % 251) as u8).collect();
        let lengths = (0..1500).step_by(7).chain([4096, 12_288, 12_289, 60_000]);
        for (i, len) in lengths.enumerate() {
            let (to_at, from_at) = (i * 5 % 64, i * 11 % 70);
            for streams in [false, true] {
                let source = &from[from_at..from_at + len];
                let mut to = vec![0_u8; len + 200];
                let sum = copy_summed(i as u32, &mut to[to_at..to_at + len], source, streams);
                crate::bytes::memory::finish_stores();
                assert_eq!(sum, crc32c(i as u32, source), "{len} bytes");
                assert_eq!(sum, crc32c_of_memory(i as u32, source), "{len} bytes");
                assert_eq!(&to[to_at..to_at + len], source);
                assert!(
                    to[..to_at]
                        .iter()
                        .chain(&to[to_at + len..])
                        .all(|b| *b == 0)
                );
            }
        }
    }
}
