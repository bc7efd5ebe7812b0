//! crc32c of the 256 KiB chunks of a shard file, taken while the bytes stream by.

/// Bytes of a chunk; the last of a file may be shorter.
pub const CHUNK_BYTES: usize = 256 << 10;

/// crc32c of the next bytes, going on from what came before (0 at the start).
pub fn crc32c(before: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(before, bytes)
}
