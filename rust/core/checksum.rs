//! crc32c of the 256 KiB chunks of a shard file: taken while the bytes stream out, compared while they stream in.
//!
//! The chunks count from the first byte of the file, header included. A crc finds every burst of up to 32 bits and every
//! error of up to 3 bits in a chunk; it does not withstand someone who wants to deceive.

use crate::error::{Error, Kind, Result};
use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of a chunk; the last of a file may be shorter.
pub const CHUNK_BYTES: usize = 256 << 10;

/// crc32c of the next bytes, going on from what came before (0 at the start).
pub fn crc32c(before: u32, bytes: &[u8]) -> u32 {
    // The crate's state is the sum before its last step, which inverts it.
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!before));
    digest.update(bytes);
    digest.finalize() as u32
}

/// What a shard file must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checksums {
    n_bytes: u64,
    header_bytes: u64,
    header_checksum: u32,
    chunks: Vec<u32>,
}

impl Checksums {
    /// Checksums of a file of `n_bytes`, of which the first `header_bytes` come before the data.
    ///
    /// # Errors
    /// There are not as many checksums as chunks, or the header is larger than the file.
    pub fn new(
        n_bytes: u64,
        header_bytes: u64,
        header_checksum: u32,
        chunks: Vec<u32>,
    ) -> Result<Self> {
        if n_bytes.div_ceil(CHUNK_BYTES as u64) != chunks.len() as u64 || header_bytes > n_bytes {
            let message = format!(
                "{} checksums and {header_bytes} header bytes do not belong to a file of {n_bytes} bytes",
                chunks.len()
            );
            return Err(Error::new(Kind::Argument, message));
        }
        Ok(Self {
            n_bytes,
            header_bytes,
            header_checksum,
            chunks,
        })
    }

    /// Checksums as they are stored: little-endian, 4 bytes each.
    ///
    /// # Errors
    /// As `new`.
    pub fn from_bytes(
        n_bytes: u64,
        header_bytes: u64,
        header_checksum: u32,
        checksums: &[u8],
    ) -> Result<Self> {
        let (chunks, rest) = checksums.as_chunks::<4>();
        if !rest.is_empty() {
            let message = format!(
                "{} bytes of checksums are no multiple of 4",
                checksums.len()
            );
            return Err(Error::new(Kind::Argument, message));
        }
        let chunks = chunks.iter().map(|sum| u32::from_le_bytes(*sum)).collect();
        Self::new(n_bytes, header_bytes, header_checksum, chunks)
    }

    /// The checksums as they are stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.chunks
            .iter()
            .flat_map(|sum| sum.to_le_bytes())
            .collect()
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
        self.chunks.len()
    }

    /// First byte and length of a chunk.
    pub fn chunk(&self, number: usize) -> (u64, usize) {
        let start = (number * CHUNK_BYTES) as u64;
        (
            start,
            (self.n_bytes - start).min(CHUNK_BYTES as u64) as usize,
        )
    }

    /// The chunks that hold a byte of a range.
    pub fn chunks_over(&self, start: u64, len: u64) -> std::ops::Range<usize> {
        if len == 0 {
            return 0..0;
        }
        let chunk = CHUNK_BYTES as u64;
        (start / chunk) as usize..(start + len).div_ceil(chunk) as usize
    }

    /// Whether these bytes are the chunk.
    pub fn matches(&self, number: usize, bytes: &[u8]) -> bool {
        self.is(number, crc32c(0, bytes))
    }

    /// Whether this is the sum of the chunk.
    pub fn is(&self, number: usize, sum: u32) -> bool {
        sum == self.chunks[number]
    }
}
