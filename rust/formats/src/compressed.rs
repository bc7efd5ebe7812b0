//! A range of a file that is compressed with zstd, as a source of its own.
//!
//! Unpacked bytes are kept in a cache that all sources share. It holds 256 MiB and the range that is in use, so that a
//! conversion of a large folder needs no more memory than that.

use reshard_core::source::{Ranges, Source};
use reshard_core::{Error, Result};
use std::collections::VecDeque;
use std::io::Read;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

const CACHE_BYTES: usize = 256 << 20;

/// Whether a range was compressed with zstd and nothing else.
pub fn is_zstd(transforms: &[String]) -> bool {
    matches!(transforms, [one] if one == "stream.zstd" || one.starts_with("stream.zstd/"))
}

/// The unpacked bytes of a range.
///
/// # Errors
/// The range is damaged, or has more than `max_bytes` bytes.
pub fn decompressed(source: Source, start: u64, n_bytes: u64, max_bytes: u64) -> Result<Source> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let path: PathBuf = source.path().to_owned();
    let packed = Packed {
        source,
        start,
        n_bytes,
        max_bytes,
        number: NEXT.fetch_add(1, Ordering::Relaxed),
    };
    let n_bytes = packed.bytes()?.len() as u64;
    Ok(Source::of_ranges(path, n_bytes, Box::new(packed)))
}

#[derive(Debug)]
struct Packed {
    source: Source,
    start: u64,
    n_bytes: u64,
    max_bytes: u64,
    /// Its key in the cache.
    number: u64,
}

type Cache = VecDeque<(u64, Arc<Vec<u8>>)>;

/// The latest ranges, the least recently used one first.
static CACHE: Mutex<Cache> = Mutex::new(VecDeque::new());

impl Packed {
    fn bytes(&self) -> Result<Arc<Vec<u8>>> {
        let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = cache.iter().position(|(number, _)| *number == self.number)
            && let Some(entry) = cache.remove(at)
        {
            let bytes = Arc::clone(&entry.1);
            cache.push_back(entry);
            return Ok(bytes);
        }
        drop(cache);
        let bytes = Arc::new(self.unpack()?);
        let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        if !cache.iter().any(|(number, _)| *number == self.number) {
            cache.push_back((self.number, Arc::clone(&bytes)));
        }
        while cache.len() > 1
            && cache.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() > CACHE_BYTES
        {
            cache.pop_front();
        }
        Ok(bytes)
    }

    fn unpack(&self) -> Result<Vec<u8>> {
        let bad = |what: String| {
            Error::damaged(format!(
                "bytes {} to {} {what}",
                self.start,
                self.start.saturating_add(self.n_bytes)
            ))
        };
        if self
            .start
            .checked_add(self.n_bytes)
            .is_none_or(|end| end > self.source.n_bytes())
        {
            return Err(bad(format!(
                "lie beyond its end at {}",
                self.source.n_bytes()
            )));
        }
        let mut packed = vec![0; self.n_bytes as usize];
        self.source.read_at(self.start, &mut packed)?;
        let decoder = ruzstd::decoding::StreamingDecoder::new(packed.as_slice());
        let decoder =
            decoder.map_err(|error| bad(format!("are not compressed with zstd: {error}")))?;
        let mut bytes = Vec::new();
        let read = decoder
            .take(self.max_bytes.saturating_add(1))
            .read_to_end(&mut bytes);
        read.map_err(|error| bad(format!("are damaged: {error}")))?;
        if bytes.len() as u64 > self.max_bytes {
            return Err(bad(format!(
                "unpack to more than the {} bytes that belong there",
                self.max_bytes
            )));
        }
        Ok(bytes)
    }
}

impl Ranges for Packed {
    fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
        let bytes = self.bytes()?;
        let from = bytes.get(start as usize..start as usize + to.len());
        let from = from.ok_or_else(|| Error::damaged("a range lies beyond the unpacked bytes"))?;
        to.copy_from_slice(from);
        Ok(())
    }
}
