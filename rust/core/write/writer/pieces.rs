//! The pieces of a file: filled, summed and written by several threads.

use super::buffers::Buffer;
use super::content::Content;
use super::sums::{ArraySums, put_sums};
use super::{BAND_BYTES, PIECE_BYTES, Sink};
use crate::bytes::memory::{Stores, touch};
use crate::check::finite::Finder;
use crate::control::Control;
use crate::error::{Error, Kind, Result};
use crate::files::checksum::{CHUNK_BYTES, crc32c};
use crate::planning::plan::PlanSource;
use crate::read::readahead::Readahead;
use crate::read::window::Early;
use crate::write::route::{Route, Routes};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// The source of the bytes of a file.
#[derive(Clone, Copy)]
pub(super) enum Bytes<'a> {
    Planned(&'a Content<'a>),
    InMemory(&'a [u8]),
}

/// Writes the pieces of a file to a sink.
pub(super) struct PieceWriter<'a, S> {
    sink: &'a S,
    bytes: Bytes<'a>,
    /// What is written of the file; it begins with a chunk.
    range: Range<u64>,
    routes: Option<&'a Routes>,
    next: AtomicU64,
    checksums: Vec<AtomicU32>,
    finder: &'a Finder,
    /// For files with sums of arrays.
    array_sums: Option<ArraySums>,
    fill_permits: Semaphore,
    /// Held while new memory is touched.
    touching: Mutex<()>,
    /// What is fetched early from remote sources.
    window: Option<&'a dyn Early>,
    /// What is requested early of mapped files.
    readahead: Option<Readahead<'a>>,
    control: &'a Control,
}

impl<'a, S: Sink> PieceWriter<'a, S> {
    /// At most as many pieces are filled concurrently as the current pool has threads.
    pub(super) fn new(
        sink: &'a S,
        bytes: Bytes<'a>,
        range: Range<u64>,
        routes: Option<&'a Routes>,
        finder: &'a Finder,
        window: Option<&'a dyn Early>,
        control: &'a Control,
    ) -> Self {
        let n_bytes = range.end - range.start;
        let n_chunks = (n_bytes as usize).div_ceil(CHUNK_BYTES);
        // `current_num_threads` starts the threads of a pool; a single piece needs none.
        let n_at_once = if n_bytes > PIECE_BYTES as u64 {
            rayon::current_num_threads()
        } else {
            1
        };
        Self {
            sink,
            bytes,
            next: AtomicU64::new(range.start),
            routes,
            checksums: (0..n_chunks).map(|_| AtomicU32::new(0)).collect(),
            finder,
            array_sums: match bytes {
                Bytes::Planned(content) if !content.container.sums.is_empty() => {
                    Some(ArraySums::new(content.plan.arrays().len(), range.start))
                }
                _ => None,
            },
            readahead: match bytes {
                Bytes::Planned(content) => content.readahead(&range),
                Bytes::InMemory(_) => None,
            },
            range,
            fill_permits: Semaphore::new(n_at_once),
            touching: Mutex::new(()),
            window,
            control,
        }
    }

    /// Writes all pieces with one thread per buffer, and returns the checksums of the chunks and the CRC-32 of what was
    /// written of each array, for files with sums of arrays.
    pub(super) fn write(self, mut buffers: Vec<Buffer<'_>>) -> Result<(Vec<u32>, Vec<u32>)> {
        if let [buffer] = &mut buffers[..] {
            // Starting a thread takes longer than writing a small file.
            self.write_some(buffer.memory)?;
            return Ok(self.written());
        }
        let n_buffers = buffers.len();
        let buffers = Mutex::new(buffers.into_iter());
        let next = || {
            let mut buffers = buffers.lock().unwrap_or_else(PoisonError::into_inner);
            buffers.next()
        };
        let write = || next().map_or(Ok(()), |buffer| self.touch_and_write(buffer));
        std::thread::scope(|scope| {
            // Where the system refuses threads, those that exist write all pieces.
            let started = (0..n_buffers)
                .map_while(|_| std::thread::Builder::new().spawn_scoped(scope, write).ok());
            let writers: Vec<_> = started.collect();
            if writers.is_empty() {
                return write();
            }
            // All threads are joined before an error is returned.
            let results: Vec<_> = writers
                .into_iter()
                .map(std::thread::ScopedJoinHandle::join)
                .collect();
            results.into_iter().try_for_each(|result| {
                let panicked = Error::new(Kind::Io, "a writer thread panicked");
                result.unwrap_or(Err(panicked))
            })
        })?;
        Ok(self.written())
    }

    fn written(self) -> (Vec<u32>, Vec<u32>) {
        let checksums = self.checksums.into_iter().map(AtomicU32::into_inner);
        let crcs = self.array_sums.map_or_else(Vec::new, ArraySums::into_crcs);
        (checksums.collect(), crcs)
    }

    /// As [`Self::write_some`]; touches new memory first, while no other thread does.
    fn touch_and_write(&self, buffer: Buffer<'_>) -> Result<()> {
        let Buffer {
            memory,
            touched_bytes,
        } = buffer;
        let new = &mut memory[touched_bytes..];
        if !new.is_empty() {
            let _alone = self.touching.lock().unwrap_or_else(PoisonError::into_inner);
            touch(new);
        }
        self.write_some(memory)
    }

    fn write_some(&self, buffer: &mut [u8]) -> Result<()> {
        loop {
            let at = self.next.fetch_add(PIECE_BYTES as u64, Ordering::Relaxed);
            if at >= self.range.end {
                return Ok(());
            }
            let written = self.write_one(at, buffer);
            if written.is_err() {
                // The other threads stop at their next piece.
                self.next.store(self.range.end, Ordering::Relaxed);
                return written;
            }
        }
    }

    fn write_one(&self, at: u64, buffer: &mut [u8]) -> Result<()> {
        let len = (self.range.end - at).min(PIECE_BYTES as u64) as usize;
        let mut permit = Some(self.fill_permits.acquire());
        self.control.check().inspect_err(|_| self.fail_sums())?;
        let piece = match self.bytes {
            Bytes::InMemory(image) => {
                let piece = &image[at as usize..at as usize + len];
                self.sum_chunks(at, piece);
                piece
            }
            Bytes::Planned(content) => {
                let piece = &mut buffer[..len];
                let unfilled = OnDrop(|| self.fail_sums());
                let number = ((at - self.range.start) / PIECE_BYTES as u64) as usize;
                if let Some(window) = self.window {
                    window.wait_for(number, self.control)?;
                }
                if let Some(readahead) = &self.readahead {
                    readahead.advance(number);
                }
                self.fill_piece(content, at, piece)?;
                if let Some(window) = self.window {
                    window.finish(number);
                }
                if let Some(sums) = &self.array_sums {
                    sums.add(at, content.part_sums(at, piece));
                    // A thread that waits for earlier pieces holds no permit: they may need it.
                    permit = None;
                    let here = content.sums_in(at, at + len as u64);
                    if self.sink.leaves_sums() {
                        put_sums(here, at, piece, |_| 0);
                    } else if !here.is_empty() && !sums.fill(here, at, piece) {
                        return Ok(()); // the thread that failed returns the error
                    }
                    self.sum_chunks(at, piece);
                }
                std::mem::forget(unfilled);
                piece
            }
        };
        drop(permit);
        let write = |route| match self.bytes {
            Bytes::Planned(content) if self.array_sums.is_some() && self.sink.leaves_sums() => {
                self.write_around_sums(content, at, piece, route)
            }
            _ => self.sink.write_at(at, piece, route),
        };
        match self.routes {
            None => write(Route::Direct),
            Some(routes) => routes.write(len as u64, write),
        }?;
        if let Bytes::InMemory(_) = self.bytes {
            self.control.advance(len as u64); // `fill_band` counts the bytes of the other kind
        }
        Ok(())
    }

    /// Writes a piece without the places of sums. The chunks that have some are written into the page cache.
    fn write_around_sums(
        &self,
        content: &Content<'_>,
        at: u64,
        piece: &[u8],
        route: Route,
    ) -> Result<()> {
        let write = |from: usize, to: usize, route| {
            self.sink
                .write_at(at + from as u64, &piece[from..to], route)
        };
        let mut next = 0;
        for (i, chunk) in piece.chunks(CHUNK_BYTES).enumerate() {
            let (from, to) = (i * CHUNK_BYTES, i * CHUNK_BYTES + chunk.len());
            let sums = content.sums_in(at + from as u64, at + to as u64);
            if sums.is_empty() {
                continue;
            }
            write(next, from, route)?;
            next = from;
            for sum in sums {
                // A sum can lie across an end of the chunk.
                let sum_start = sum.at.saturating_sub(at) as usize;
                write(next, sum_start.max(next), Route::PageCache)?;
                next = ((sum.at + 4 - at) as usize).min(to);
            }
            write(next, to, Route::PageCache)?;
            next = to;
        }
        write(next, piece.len(), route)
    }

    /// Wakes the threads that wait for the sums of a piece that is never filled.
    fn fail_sums(&self) {
        if let Some(sums) = &self.array_sums {
            sums.fail();
        }
    }

    /// Fills a piece, and computes the checksums of each band while it is in the cache of the processor. Those of a file
    /// with sums of arrays are computed later, when the sums are in the piece.
    fn fill_piece(&self, content: &Content<'_>, at: u64, piece: &mut [u8]) -> Result<()> {
        let sources = &content.plan.sources;
        // Each band faults in what it copies out of files: small bands would do so more often.
        let band_bytes = if sources
            .iter()
            .any(|one| matches!(one, PlanSource::File(..)))
        {
            BAND_BYTES
        } else {
            CHUNK_BYTES
        };
        for (i, band) in piece.chunks_mut(band_bytes).enumerate() {
            let at = at + (i * band_bytes) as u64;
            content.fill_band(at, band, Stores::Plain, self.window, self.control)?;
            if self.array_sums.is_none() {
                self.sum_chunks(at, band);
            }
        }
        Ok(())
    }

    /// Computes the checksums of the chunks from `at` on, and looks for values that are not finite.
    fn sum_chunks(&self, at: u64, bytes: &[u8]) {
        let checksums = &self.checksums[(at - self.range.start) as usize / CHUNK_BYTES..];
        let starts = (at..).step_by(CHUNK_BYTES);
        for ((chunk, checksum), start) in bytes.chunks(CHUNK_BYTES).zip(checksums).zip(starts) {
            checksum.store(crc32c(0, chunk), Ordering::Relaxed);
            self.finder.look(start, chunk);
        }
    }
}
/// Runs a function when it is dropped.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Limits the number of threads that fill pieces concurrently. A thread that writes holds no permit.
struct Semaphore {
    n_free: Mutex<usize>,
    freed: Condvar,
}

impl Semaphore {
    fn new(n: usize) -> Self {
        Self {
            n_free: Mutex::new(n),
            freed: Condvar::new(),
        }
    }

    /// Waits for a permit, which is released when it is dropped.
    fn acquire(&self) -> impl Drop + '_ {
        struct Permit<'a>(&'a Semaphore);
        impl Drop for Permit<'_> {
            fn drop(&mut self) {
                *self.0.n_free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                self.0.freed.notify_one();
            }
        }
        let n_free = self.n_free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut n_free = self
            .freed
            .wait_while(n_free, |n_free| *n_free == 0)
            .unwrap_or_else(PoisonError::into_inner);
        *n_free -= 1;
        Permit(self)
    }
}
