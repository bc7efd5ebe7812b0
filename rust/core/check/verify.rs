//! Verification: of every chunk that a plan reads, and of complete files past the page cache.
//!
//! A chunk of a map is verified once per execution of a plan, by the first band that reads it, while it is copied: it
//! is read from memory once. Bytes of a positioned read are verified after every read, because another read can return
//! other bytes.

use crate::bytes::memory::Memory;
use crate::bytes::team::on_threads;
use crate::check::finite::Finder;
use crate::control::Control;
use crate::error::{Error, Kind, Printable, Result};
use crate::files::checksum::{CHUNK_BYTES, Checksums, copy_summed, crc32c_of_memory};
use crate::files::shard_file::ShardFile;
use crate::files::source::Source;
use crate::planning::plan::{Array, Plan, PlanSource};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a scrub reads at once.
const PIECE_BYTES: usize = 4 << 20;
/// Requests at once of what is verified on another host.
const N_REQUESTS: usize = 16;

/// A range of a mapped file that is faulted in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResidentRange<'a> {
    first: u64,
    bytes: &'a [u8],
}

impl<'a> ResidentRange<'a> {
    /// A range of a mapped file that begins at a byte of the file and is faulted in.
    pub(crate) fn new(first: u64, bytes: &'a [u8]) -> Self {
        Self { first, bytes }
    }

    /// Bytes of the file: from this range if it contains them, otherwise faulted in.
    fn bytes(this: Option<Self>, file: &'a ShardFile, at: u64, n: u64) -> Result<Option<&'a [u8]>> {
        let known = this.and_then(|this| {
            let from = at.checked_sub(this.first)? as usize;
            this.bytes.get(from..from + n as usize)
        });
        known.map_or_else(|| file.source().bytes(at, n), |known| Ok(Some(known)))
    }
}

/// The chunks of the sources of a plan that have been verified in this execution.
#[derive(Debug)]
pub(crate) struct Checks {
    /// One bit per chunk, one entry per source; `None` for a source that is not verified.
    claims: Vec<Option<Box<[AtomicU64]>>>,
}

impl Checks {
    pub(crate) fn new(plan: &Plan<'_>) -> Self {
        let claims = plan.sources.iter().map(|source| match source {
            PlanSource::File(_, file) if plan.verify => file.checksums().map(|checksums| {
                (0..checksums.n_chunks().div_ceil(64))
                    .map(|_| AtomicU64::new(0))
                    .collect()
            }),
            _ => None,
        });
        Self {
            claims: claims.collect(),
        }
    }

    /// The checksums of a source; `None` if it is not verified.
    pub(crate) fn checksums<'a>(&self, source: u32, file: &'a ShardFile) -> Option<&'a Checksums> {
        self.claims[source as usize].as_ref()?;
        file.checksums().map(AsRef::as_ref)
    }

    /// Claims a chunk for verification; false if another thread has claimed it.
    fn claim(&self, source: u32, chunk: usize) -> bool {
        let bit = 1 << (chunk % 64);
        self.claims[source as usize]
            .as_ref()
            .is_some_and(|bits| bits[chunk / 64].fetch_or(bit, Ordering::Relaxed) & bit == 0)
    }

    /// Verifies a chunk of a mapped file and copies a run of it in the same pass. False if another thread verifies the
    /// chunk, or the file is not mapped.
    pub(crate) fn copy_run(
        &self,
        source: u32,
        (file, resident): (&ShardFile, Option<ResidentRange<'_>>),
        checksums: &Checksums,
        start: u64,
        (to, streams): (&mut [u8], bool),
        control: &Control,
    ) -> Result<bool> {
        let chunks = checksums.chunks_over(start, to.len() as u64);
        if chunks.len() != 1 || !self.claim(source, chunks.start) {
            return Ok(false);
        }
        let (at, n) = checksums.chunk(chunks.start);
        let Some(bytes) = ResidentRange::bytes(resident, file, at, n as u64)? else {
            return Ok(false);
        };
        control.fetched(n as u64);
        let (before, rest) = bytes.split_at((start - at) as usize);
        let (run, after) = rest.split_at(to.len());
        let checksum = copy_summed(crc32c_of_memory(0, before), to, run, streams);
        if !checksums.is(chunks.start, crc32c_of_memory(checksum, after)) {
            return Err(differs(file.source(), at, n));
        }
        Ok(true)
    }

    /// A range of a mapped file whose chunks are verified, by this thread or by another one of the same execution.
    ///
    /// If the other thread finds damage, the execution fails.
    pub(crate) fn mapped<'a>(
        &self,
        source: u32,
        (file, resident): (&'a ShardFile, Option<ResidentRange<'a>>),
        checksums: &Checksums,
        (start, len): (u64, u64),
        control: &Control,
    ) -> Result<Option<&'a [u8]>> {
        for chunk in checksums.chunks_over(start, len) {
            if !self.claim(source, chunk) {
                continue;
            }
            let (at, n) = checksums.chunk(chunk);
            let Some(bytes) = ResidentRange::bytes(resident, file, at, n as u64)? else {
                return Ok(None);
            };
            control.fetched(n as u64);
            if !checksums.is(chunk, crc32c_of_memory(0, bytes)) {
                return Err(differs(file.source(), at, n));
            }
            if at <= start && start + len <= at + n as u64 {
                // The range is inside the chunk that was just faulted in.
                let from = (start - at) as usize;
                return Ok(Some(&bytes[from..from + len as usize]));
            }
        }
        ResidentRange::bytes(resident, file, start, len)
    }
}

/// Whether [`verify_files`] reads a file.
pub(crate) fn verifies_files(plan: &Plan<'_>) -> bool {
    let has_crc =
        |source: &PlanSource| matches!(source, PlanSource::File(_, file) if file.has_crc());
    plan.verify && plan.sources.iter().any(has_crc)
}

/// Verifies the sources of a plan that end with a CRC of their content, if the plan is verified.
///
/// # Errors
/// A source differs from its CRC, or cannot be read.
pub(crate) fn verify_files(plan: &Plan<'_>, control: &Control) -> Result<()> {
    // Without work for them no pool is used, which a caller on another thread may not have.
    if !verifies_files(plan) {
        return Ok(());
    }
    let mut positions: Vec<Vec<u64>> = vec![Vec::new(); plan.sources.len()];
    for copy_op in plan.arrays().iter().flat_map(|array| &array.copy_ops) {
        positions[copy_op.source as usize].push(copy_op.src_start_bytes);
    }
    let sources = plan.sources.par_iter().zip(positions);
    sources.try_for_each(|(source, positions)| match source {
        PlanSource::File(_, file) if file.has_crc() => {
            file.verify_at(positions.into_iter(), control)
        }
        _ => Ok(()),
    })
}

/// Reads the chunks that contain a range into scratch memory by `read`, and verifies them. Returns the start of the range
/// in it.
pub(crate) fn read_chunks(
    file: &ShardFile,
    checksums: &Checksums,
    (start, len): (u64, u64),
    scratch: &mut Vec<u8>,
    read: impl FnOnce(u64, &mut [u8]) -> Result<()>,
) -> Result<usize> {
    let chunks = checksums.chunks_over(start, len);
    let (first, _) = checksums.chunk(chunks.start);
    let (last, last_len) = checksums.chunk(chunks.end - 1);
    scratch.resize((last - first) as usize + last_len, 0);
    read(first, scratch)?;
    verify_chunks(file, checksums, chunks.start, scratch)?;
    Ok((start - first) as usize)
}

/// Verifies complete chunks in memory, from chunk `first` on.
pub(crate) fn verify_chunks(
    file: &ShardFile,
    checksums: &Checksums,
    first: usize,
    bytes: &[u8],
) -> Result<()> {
    for (i, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
        if !checksums.matches(first + i, chunk) {
            let (at, n) = checksums.chunk(first + i);
            return Err(differs(file.source(), at, n));
        }
    }
    Ok(())
}

/// A chunk that is verified: the number of its source, the file, its number there, and the array that it is verified for.
type Chunk<'a> = (u32, &'a ShardFile, &'a Checksums, usize, &'a Array);

/// Verifies every chunk that contains a byte of these contiguous arrays, and the files that end with a CRC. Nothing is
/// copied.
///
/// # Errors
/// A chunk differs from its checksum, or cannot be read.
pub fn verify(plan: &Plan<'_>, arrays: &[usize], control: &Control) -> Result<()> {
    verify_files(plan, control)?;
    let checks = Checks::new(plan);
    let mut chunks = Vec::new();
    for array in arrays.iter().map(|&i| &plan.arrays()[i]) {
        let Some(copy_op) = array.contiguous() else {
            continue;
        };
        if let PlanSource::File(_, file) = plan.source(copy_op)
            && let Some(checksums) = checks.checksums(copy_op.source, file)
        {
            let range = checksums.chunks_over(copy_op.src_start_bytes, array.n_bytes());
            chunks.extend(range.map(|chunk| (copy_op.source, &**file, checksums, chunk, array)));
        }
    }
    let verify_one = |&(source, file, checksums, chunk, array): &Chunk<'_>| {
        control.check()?;
        let (at, n) = checksums.chunk(chunk);
        let verified = if file.source().is_mapped() {
            checks
                .mapped(source, (file, None), checksums, (at, n as u64), control)
                .map(|_| ())
        } else {
            let mut scratch = Vec::new();
            let read = |at, to: &mut [u8]| {
                control.fetched(to.len() as u64);
                file.source().read_at(at, to)
            };
            read_chunks(file, checksums, (at, n as u64), &mut scratch, read).map(|_| ())
        };
        verified.map_err(|error| error.key(&array.name))
    };
    if chunks.iter().any(|(_, file, ..)| file.source().is_remote()) {
        on_threads(N_REQUESTS, chunks.len() as u64, |i| {
            verify_one(&chunks[i as usize])
        })
        .map(drop)
    } else {
        chunks.par_iter().try_for_each(verify_one)
    }
}

fn differs(source: &Source, at: u64, n: usize) -> Error {
    let path = source.path();
    let message = format!(
        "{}: bytes {at} to {} differ from what was written",
        Printable(&path.to_string_lossy()),
        at + n as u64
    );
    Error::damaged(message).path(path).hint(
        "`reshard verify` lists all damage; `reshard explain` lists older iterations that are complete",
    )
}

/// Reads a range of a file, which is of complete chunks, and compares it with the checksums of the file. Returns the byte
/// ranges that differ; adjacent ranges are joined.
///
/// With `direct` the page cache is bypassed where the file system supports it, so that the content of the disk is
/// verified. The values of arrays are looked at in the same pass, if `values` is given.
///
/// # Errors
/// The file has another size, or cannot be read; the range is not of complete chunks.
pub fn scrub(
    source: &Source,
    checksums: &Checksums,
    range: Range<u64>,
    values: Option<&Finder>,
    direct: bool,
    control: &Control,
) -> Result<Vec<(u64, u64)>> {
    let path = source.path();
    if source.n_bytes() != checksums.n_bytes() {
        let message = format!(
            "{} has {} bytes, but {} were written",
            Printable(&path.to_string_lossy()),
            source.n_bytes(),
            checksums.n_bytes()
        );
        return Err(Error::damaged(message).path(path));
    }
    let (n_bytes, chunk_bytes) = (checksums.n_bytes(), CHUNK_BYTES as u64);
    let is_cut = |at: u64| at.is_multiple_of(chunk_bytes) || at == n_bytes;
    if range.start > range.end || range.end > n_bytes || !is_cut(range.start) || !is_cut(range.end)
    {
        let message = format!("bytes {range:?} are not complete chunks of {chunk_bytes}");
        return Err(Error::new(Kind::Argument, message).path(path));
    }
    let uncached = direct.then(|| source.uncached()).transpose()?;
    let buffers: Mutex<Vec<Memory>> = Mutex::new(Vec::new());
    let n_pieces = (range.end - range.start).div_ceil(PIECE_BYTES as u64);
    let verify_piece = |piece: u64| {
        control.check()?;
        let start = range.start + piece * PIECE_BYTES as u64;
        let len = (range.end - start).min(PIECE_BYTES as u64) as usize;
        let free = buffers.lock().map_or(None, |mut buffers| buffers.pop());
        let mut memory = match free {
            Some(memory) => memory,
            None => Memory::new(PIECE_BYTES)?,
        };
        let buffer = memory.as_mut_slice();
        match &uncached {
            Some(uncached) => uncached.read_at(start, len, buffer)?,
            None => source.read_at(start, &mut buffer[..len])?,
        }
        let first = start as usize / CHUNK_BYTES;
        let bad = buffer[..len]
            .chunks(CHUNK_BYTES)
            .enumerate()
            .filter(|(i, chunk)| {
                let is_correct = checksums.matches(first + i, chunk);
                if let Some(values) = values {
                    values.look(start + (i * CHUNK_BYTES) as u64, chunk);
                }
                !is_correct
            })
            .map(|(i, _)| first + i)
            .collect();
        control.advance(len as u64);
        if let Ok(mut buffers) = buffers.lock() {
            buffers.push(memory);
        }
        Ok(bad)
    };
    let damaged: Vec<Vec<usize>> = if source.is_remote() {
        on_threads(N_REQUESTS, n_pieces, verify_piece)?
    } else {
        (0..n_pieces)
            .into_par_iter()
            .map(verify_piece)
            .collect::<Result<_>>()?
    };
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for (start, len) in damaged
        .into_iter()
        .flatten()
        .map(|chunk| checksums.chunk(chunk))
    {
        let end = start + len as u64;
        match ranges.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => ranges.push((start, end)),
        }
    }
    Ok(ranges)
}
