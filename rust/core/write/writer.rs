//! Writes one shard file atomically: streamed, within a memory budget.
//!
//! The file is written in pieces of 4 MiB, up to eight at a time. Each writer thread has memory for one piece. It
//! claims the next piece, fills it from the sources of a plan, computes the checksums of its 256 KiB chunks while they
//! are in the cache, writes it, and claims the next one. The threads do not wait for each other. The checksums are
//! computed before the write, so they are those of the intended bytes. The bytes go to a temporary file in the same
//! folder, which is synced and then renamed: a file under its final name is complete.
//!
//! The first write to new memory makes the system provide its pages, which can take longer than filling them: 3 ms for
//! each 2 MiB where the host of a virtual machine must provide them too. One thread at a time does that. Meanwhile the
//! other processors fill and write the pieces whose memory exists.
//!
//! `O_DIRECT` gives the highest throughput of durable writes and does not fill the page cache. Writes are buffered
//! where the file system does not support it, and for a tail that is not a multiple of the block size. A file that need
//! not be durable takes the faster of both, see [`crate::write::route`].
//!
//! A file of another format is given as a [`Container`]: the bytes between the arrays, and the places of their CRC-32.
//! A piece with such a sum is written when all pieces before it are filled: every byte is written once.

use crate::bytes::memory::{Memory, Stores, finish_stores, touch};
use crate::bytes::tuning::Tuning;
use crate::check::finite::{Finder, NotFinite};
use crate::check::verify::{Checks, verifies_files, verify_files};
use crate::control::Control;
use crate::error::{Error, Kind, Result};
use crate::files::checksum::{CHUNK_BYTES, Checksums, crc32c};
use crate::files::header::{self, Header};
use crate::files::source::open_direct;
use crate::planning::plan::{Array, Plan, PlanSource};
use crate::read::copy::fill_bytes;
use crate::read::fetch::{Faulted, Run};
use crate::write::route::{Route, Routes};
use crc_fast::{CrcAlgorithm, checksum, checksum_combine};
use rayon::prelude::*;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::retry_on_intr;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Alignment of direct writes that every disk accepts.
const DIRECT_BLOCK_BYTES: usize = 4096;
const PIECE_BYTES: usize = 4 << 20;
/// Enough for the full throughput of disks.
const PIECES_IN_FLIGHT: usize = 8;
/// Pieces whose memory is touched before a file is written. More would take the processors from what goes before it.
const PREPARED_PIECES: usize = 2;
const BAND_BYTES: usize = 2 << 20;
/// How much new memory is touched before it is asked whether to stop: a huge page.
const TOUCHED_BYTES: usize = 2 << 20;
/// In files of at least this size the data is page-aligned, for direct reads and maps.
const PAGE_ALIGNED_FROM_BYTES: u64 = 1 << 20;
/// The length field of a safetensors file, before the text of the header.
const LENGTH_BYTES: usize = 8;
/// The smallest budget: one piece is filled while another is written.
pub const MIN_MEMORY_BYTES: u64 = 2 * PIECE_BYTES as u64;

/// The hint of a write that failed.
pub(crate) fn write_hint(errno: Option<i32>) -> &'static str {
    use rustix::io::Errno;
    match errno.map(Errno::from_raw_os_error) {
        Some(Errno::NOSPC) => {
            "the destination is unchanged; free disk space, or choose another destination"
        }
        Some(Errno::DQUOT) => {
            "the destination is unchanged; the quota on its file system is used up: remove files that count towards it, \
             or choose another destination"
        }
        Some(Errno::FBIG) => {
            "the destination is unchanged; files of this size are not allowed: raise the limit of this process \
             (`ulimit -f`), write smaller files, or choose a file system without such a limit"
        }
        _ => "the destination is unchanged",
    }
}

/// Where the arrays of a plan and all other bytes lie in a file.
#[derive(Debug, Clone, Default)]
pub struct Container {
    /// The bytes before, between and behind the arrays, in the order of the file.
    pub literals: Vec<u8>,
    /// First byte of each array in the file; arrays lie in the order of the plan.
    pub starts: Vec<u64>,
    /// The places of checksums, in the order of the file.
    pub sums: Vec<Sum>,
}

/// Four bytes of a file that get the CRC-32 of an array, little-endian. They lie behind the array.
#[derive(Debug, Clone, Copy)]
pub struct Sum {
    /// The first of the four bytes.
    pub at: u64,
    /// Number of the array in the plan.
    pub array: usize,
}

impl Container {
    /// Checks that it holds the arrays of a plan.
    ///
    /// # Errors
    /// Arrays overlap, are not in order, or lie beyond the end; a sum lies in an array or before the end of its own.
    pub fn check(&self, plan: &Plan<'_>) -> Result<()> {
        let wrong = |what: String| Err(Error::new(Kind::Argument, what));
        let arrays = plan.arrays();
        if self.starts.len() != arrays.len() {
            let message = format!("{} starts for {} arrays", self.starts.len(), arrays.len());
            return wrong(message);
        }
        let (mut end, n_bytes) = (0, self.literals.len() as u64 + plan.n_bytes());
        for (array, start) in arrays.iter().zip(&self.starts) {
            if *start < end || n_bytes.checked_sub(*start) < Some(array.n_bytes()) {
                return wrong(format!("array `{}` cannot begin at {start}", array.name));
            }
            end = start + array.n_bytes();
        }
        let mut before = 0;
        for sum in &self.sums {
            let next = self.starts.partition_point(|start| *start <= sum.at);
            let end_of = |i: usize| self.starts[i] + arrays[i].n_bytes();
            let fits = sum.at >= before
                && sum.array < next
                && end_of(next - 1) <= sum.at
                && self.starts.get(next).copied().unwrap_or(n_bytes) >= sum.at.saturating_add(4);
            if !fits {
                return wrong(format!("a sum cannot be at {}", sum.at));
            }
            before = sum.at + 4;
        }
        Ok(())
    }
}

/// How a file is written.
#[derive(Debug, Clone)]
pub struct Options {
    /// The header's `__metadata__`.
    pub metadata: Vec<(String, String)>,
    /// The container of the arrays; `None`: a safetensors file with `metadata`.
    pub container: Option<Container>,
    /// Sync the file and its folder before the call returns.
    pub durable: bool,
    /// Use `O_DIRECT` where the file system supports it.
    pub direct: bool,
    /// Permission bits, reduced by the umask.
    pub mode: u32,
}

/// The memory through which files are written: several pieces, within a budget.
///
/// It is reused for each file, because page faults cost more than filling the memory.
#[derive(Debug)]
pub struct Buffers {
    memory: Memory,
    /// How many bytes of the memory have pages, from its beginning.
    touched_bytes: usize,
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
            max_pieces: (memory_bytes / PIECE_BYTES as u64).min(PIECES_IN_FLIGHT as u64) as usize,
            routes: Routes::default(),
        })
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

    /// Buffers of one piece each, as many as a file of this size uses, and the routes of its pieces. From now on they
    /// count as touched.
    fn for_file(&mut self, n_bytes: u64) -> Result<(Vec<Buffer<'_>>, &Routes)> {
        let n = self.allocate(n_bytes)?;
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
struct Buffer<'a> {
    memory: &'a mut [u8],
    /// How many of its bytes have pages, from its beginning.
    touched_bytes: usize,
}

fn n_in_flight(n_bytes: u64) -> usize {
    n_bytes
        .div_ceil(PIECE_BYTES as u64)
        .min(PIECES_IN_FLIGHT as u64) as usize
}

/// The destination of a file of a known size. [`Self::publish`] makes the file visible. A sink that is dropped before
/// that is removed, and an older file with the same name is unchanged.
pub trait Sink: Sync + Sized {
    /// Writes bytes at a position. Several threads write disjoint ranges concurrently; every byte is written once.
    fn write_at(&self, start: u64, bytes: &[u8], route: Route) -> Result<()>;

    /// Whether bytes may take either route. Otherwise all take [`Route::Direct`].
    fn has_routes(&self) -> bool {
        false
    }

    /// Makes the file visible under its name. All bytes have been written.
    fn publish(self) -> Result<()>;
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Its size and checksums.
    pub checksums: Checksums,
    /// Names of the arrays with values that are not finite, in the order of the file, and the worst value of each.
    pub not_finite: Vec<(String, NotFinite)>,
}

impl Deref for Written {
    type Target = Checksums;

    fn deref(&self) -> &Checksums {
        &self.checksums
    }
}

/// Whether a file is small enough to be written by the calling thread without a pool. Such a file is one piece.
pub fn is_small(plan: &Plan<'_>, options: &Options) -> bool {
    are_small(plan.arrays(), options) && !verifies_files(plan)
}

/// Whether a file of some arrays is one piece.
pub(crate) fn are_small(arrays: &[Array], options: &Options) -> bool {
    const MAX_ARRAYS: usize = 256;
    const MAX_BYTES: usize = 1 << 20;
    // Header bytes of one array: a name, with up to six bytes per escaped character, and at most 32 extents.
    const { assert!(MAX_BYTES + MAX_ARRAYS * 7168 + (64 << 10) * 6 <= PIECE_BYTES) };
    let metadata = options.metadata.iter();
    let metadata_bytes: usize = metadata
        .map(|(key, value)| key.len() + value.len() + 8)
        .sum();
    let literals = options
        .container
        .as_ref()
        .map_or(0, |container| container.literals.len());
    let n_bytes: u64 = arrays.iter().map(Array::n_bytes).sum();
    n_bytes + literals as u64 <= MAX_BYTES as u64
        && arrays.len() <= MAX_ARRAYS
        && metadata_bytes <= 64 << 10
}

/// Writes the arrays of a plan into one shard file, in their order and under their names.
///
/// # Errors
/// A source cannot be read or is damaged, the file cannot be written, or the run was cancelled. The temporary file is
/// then removed, and an older file with the same name is unchanged.
pub fn write(
    path: &Path,
    plan: &Plan<'_>,
    options: &Options,
    buffers: &mut Buffers,
    control: &Control,
) -> Result<Written> {
    let content = match &options.container {
        None => Content::new(plan, &options.metadata),
        Some(container) => Content::with_container(plan, container),
    };
    let content = content.map_err(|error| error.path(path))?;
    let create = |n_bytes| TemporaryFile::create(path, n_bytes, options);
    write_content(&content, create, buffers, control)
}

/// As [`write()`], to a sink that `create` makes for a size in bytes.
///
/// # Errors
/// As [`write()`]; the sink is dropped without being published.
pub fn write_to<S: Sink>(
    create: impl FnOnce(u64) -> Result<S>,
    plan: &Plan<'_>,
    metadata: &[(String, String)],
    buffers: &mut Buffers,
    control: &Control,
) -> Result<Written> {
    let content = Content::new(plan, metadata)?;
    write_content(&content, create, buffers, control)
}

fn write_content<S: Sink>(
    content: &Content<'_>,
    create: impl FnOnce(u64) -> Result<S>,
    buffers: &mut Buffers,
    control: &Control,
) -> Result<Written> {
    verify_files(content.plan, control)?;
    let n_bytes = content.n_bytes();
    let sink = create(n_bytes)?;
    let (buffers, routes) = buffers.for_file(n_bytes)?;
    let routes = sink.has_routes().then_some(routes);
    let finder = finder_of(content.plan.arrays(), &content.container.starts);
    let bytes = Bytes::Planned(content);
    let pieces = PieceWriter::new(&sink, bytes, n_bytes, routes, &finder, control);
    let chunks = pieces.write(buffers)?;
    sink.publish()?;
    Ok(Written {
        checksums: content.checksums(chunks)?,
        not_finite: not_finite_of(content.plan.arrays(), &finder),
    })
}

/// Writes the image of a file from page-aligned memory. See [`write()`].
///
/// # Errors
/// As [`write()`].
pub fn write_image(
    path: &Path,
    image: &[u8],
    header_bytes: u64,
    options: &Options,
    control: &Control,
) -> Result<Written> {
    let n_bytes = image.len() as u64;
    let temporary = TemporaryFile::create(path, n_bytes, options)?;
    let (header_image, data) = image.split_at(header_bytes as usize);
    // The names are not kept with the image: to copy those of many arrays would take the time of the caller.
    let json = header_image.get(LENGTH_BYTES..).unwrap_or_default();
    let header = Header::parse(json.to_vec(), data.len() as u64)?;
    let entries = (0..header.len()).map(|i| header.entry(i));
    let finder =
        Finder::new(entries.map(|one| (one.dtype, header_bytes + one.start, one.end - one.start)));
    let bytes = Bytes::InMemory(image);
    let pieces = PieceWriter::new(&temporary, bytes, n_bytes, None, &finder, control);
    let chunks = pieces.write(
        (0..n_in_flight(n_bytes))
            .map(|_| Buffer::default())
            .collect(),
    )?;
    temporary.publish()?;
    let found = finder.found().into_iter();
    Ok(Written {
        checksums: Checksums::new(n_bytes, header_bytes, crc32c(0, header_image), chunks)?,
        not_finite: found
            .map(|(number, worst)| (header.entry(number).name.to_owned(), worst))
            .collect(),
    })
}

/// Finds values that are not finite in arrays that begin at these bytes of a file.
pub(crate) fn finder_of(arrays: &[Array], starts: &[u64]) -> Finder {
    let spans = arrays.iter().zip(starts);
    Finder::new(spans.map(|(array, start)| (array.dtype, *start, array.n_bytes())))
}

/// The names of the arrays that are not finite.
pub(crate) fn not_finite_of(arrays: &[Array], finder: &Finder) -> Vec<(String, NotFinite)> {
    let found = finder.found().into_iter();
    found
        .map(|(number, worst)| (arrays[number].name.clone(), worst))
        .collect()
}

/// The header of a safetensors file, and the first byte of each array in the file.
pub(crate) fn header_of(
    arrays: &[Array],
    metadata: &[(String, String)],
) -> Result<(Vec<u8>, Vec<u64>)> {
    let n_bytes: u64 = arrays.iter().map(Array::n_bytes).sum();
    let align = if n_bytes >= PAGE_ALIGNED_FROM_BYTES {
        DIRECT_BLOCK_BYTES as u64
    } else {
        64
    };
    let tensors: Vec<_> = arrays
        .iter()
        .map(|a| (a.name.as_str(), a.dtype, a.shape.as_slice()))
        .collect();
    let (header, mut starts) = header::build(&tensors, metadata, align)?;
    for start in &mut starts {
        *start += header.len() as u64;
    }
    Ok((header, starts))
}

/// The content of a file: the arrays of a plan and the bytes between them.
pub(crate) struct Content<'a> {
    plan: &'a Plan<'a>,
    checks: Checks,
    container: Cow<'a, Container>,
    /// Bytes of a safetensors header; 0 for other files.
    header_bytes: u64,
    parts: Parts<'a>,
}

/// What is copied into a file, in its order.
struct Parts<'a> {
    /// First byte in the file, and what is copied there.
    arrays: Vec<(u64, Part<'a>)>,
    /// Bytes of the parts before each part, and at last of all.
    bytes_before: Vec<u64>,
}

/// An array of the plan, or a run of several. A file of many arrays has few runs, so only these are copies.
enum Part<'a> {
    Array(&'a Array),
    Run(Box<Array>),
}

impl Deref for Part<'_> {
    type Target = Array;

    fn deref(&self) -> &Array {
        match self {
            Self::Array(array) => array,
            Self::Run(run) => run,
        }
    }
}

impl Part<'_> {
    /// Makes it a run that has more bytes.
    fn lengthen(&mut self, n_bytes: u64) {
        if let Self::Array(array) = *self {
            *self = Self::Run(Box::new(array.clone()));
        }
        if let Self::Run(run) = self {
            run.lengthen_run(n_bytes);
        }
    }
}

impl<'a> Parts<'a> {
    /// The arrays that have bytes.
    fn of_arrays(plan: &'a Plan<'_>, starts: &[u64]) -> Self {
        let arrays = Self::with_bytes(plan, starts);
        Self::new(
            arrays
                .map(|(start, array)| (start, Part::Array(array)))
                .collect(),
        )
    }

    fn with_bytes(plan: &'a Plan<'_>, starts: &[u64]) -> impl Iterator<Item = (u64, &'a Array)> {
        let arrays = starts.iter().copied().zip(plan.arrays());
        arrays.filter(|(_, array)| array.n_bytes() > 0)
    }

    /// The arrays that have bytes; those that follow each other in the file and in their source are one part. To copy
    /// 100,000 small arrays as one takes as long as a large one.
    fn of_runs(plan: &'a Plan<'_>, starts: &[u64]) -> Self {
        let mut runs: Vec<(u64, Part<'a>)> = Vec::new();
        // The source of the last part, and its end there, if it is one run.
        let mut last: Option<(u32, u64)> = None;
        for (start, array) in Self::with_bytes(plan, starts) {
            let copy_op = array.contiguous();
            let here = copy_op.map(|copy_op| (copy_op.source, copy_op.src_start_bytes));
            let n_bytes = array.n_bytes();
            match runs.last_mut() {
                Some((first, run))
                    if last.is_some() && last == here && *first + run.n_bytes() == start =>
                {
                    run.lengthen(n_bytes);
                }
                _ => runs.push((start, Part::Array(array))),
            }
            last = here.map(|(source, from)| (source, from + n_bytes));
        }
        Self::new(runs)
    }

    fn new(arrays: Vec<(u64, Part<'a>)>) -> Self {
        let (mut n_bytes, mut bytes_before) = (0, vec![0]);
        for (_, array) in &arrays {
            n_bytes += array.n_bytes();
            bytes_before.push(n_bytes);
        }
        Self {
            arrays,
            bytes_before,
        }
    }
}

impl<'a> Content<'a> {
    /// A safetensors file.
    pub(crate) fn new(plan: &'a Plan<'a>, metadata: &[(String, String)]) -> Result<Self> {
        let (header, starts) = header_of(plan.arrays(), metadata)?;
        let header_bytes = header.len() as u64;
        let container = Container {
            literals: header,
            starts,
            sums: Vec::new(),
        };
        Ok(Self::of(plan, Cow::Owned(container), header_bytes))
    }

    fn with_container(plan: &'a Plan<'a>, container: &'a Container) -> Result<Self> {
        container.check(plan)?;
        Ok(Self::of(plan, Cow::Borrowed(container), 0))
    }

    fn of(plan: &'a Plan<'a>, container: Cow<'a, Container>, header_bytes: u64) -> Self {
        Self {
            plan,
            checks: Checks::new(plan),
            parts: Parts::of_runs(plan, &container.starts),
            container,
            header_bytes,
        }
    }

    pub(crate) fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    pub(crate) fn n_bytes(&self) -> u64 {
        self.container.literals.len() as u64 + self.plan.n_bytes()
    }

    fn checksums(&self, chunks: Vec<u32>) -> Result<Checksums> {
        let header = &self.container.literals[..self.header_bytes as usize];
        Checksums::new(self.n_bytes(), self.header_bytes, crc32c(0, header), chunks)
    }
}

impl Content<'_> {
    /// Fills `to` with the bytes of the file from `start` on, on the current pool.
    pub(crate) fn fill(
        &self,
        start: u64,
        to: &mut [u8],
        stores: Stores,
        control: &Control,
    ) -> Result<()> {
        let bands: Vec<_> = to.chunks_mut(BAND_BYTES).enumerate().collect();
        bands.into_par_iter().try_for_each(|(i, band)| {
            self.fill_band(start + (i * BAND_BYTES) as u64, band, stores, control)
        })
    }

    fn fill_band(&self, at: u64, to: &mut [u8], stores: Stores, control: &Control) -> Result<()> {
        control.check()?;
        let tuning = Tuning::of_process();
        // Not `plan.n_bytes()`, which adds the bytes of all arrays for each band.
        let n_bytes = self.parts.bytes_before.last().copied().unwrap_or(0);
        let run = Run {
            plan: self.plan,
            checks: &self.checks,
            stores,
            control,
            faulted: &Faulted::default(),
            tuning,
            measures: tuning.measures(n_bytes),
        };
        let filled = self.fill_parts(&self.parts, run, at, to);
        finish_stores();
        filled.map_err(|error| {
            // The name of a run is that of its first array: the error is that of the array in which the same fault is
            // found again.
            let arrays = Parts::of_arrays(self.plan, &self.container.starts);
            let checks = &Checks::new(self.plan);
            let again = self.fill_parts(&arrays, Run { checks, ..run }, at, to);
            again.err().unwrap_or(error)
        })
    }

    /// Fills `to` with the bytes of the file from `at` on.
    fn fill_parts(
        &self,
        parts: &Parts<'_>,
        run: Run<'_>,
        mut at: u64,
        mut to: &mut [u8],
    ) -> Result<()> {
        // The first part that begins behind this byte.
        let mut next = parts.arrays.partition_point(|(start, _)| *start <= at);
        while !to.is_empty() {
            if let Some((start, array)) = next.checked_sub(1).map(|i| &parts.arrays[i]) {
                let offset = at - start;
                let n = to
                    .len()
                    .min((array.n_bytes() - offset.min(array.n_bytes())) as usize);
                if n > 0 {
                    let (part, rest) = to.split_at_mut(n);
                    fill_bytes(run, array, offset, part)?;
                    run.control.advance(n as u64);
                    (at, to) = (at + n as u64, rest);
                }
                if to.is_empty() {
                    break;
                }
            }
            let gap_end = parts.arrays.get(next).map_or(u64::MAX, |(start, _)| *start);
            let n = to.len().min((gap_end - at) as usize);
            let from = (at - parts.bytes_before[next]) as usize;
            let (literal, rest) = to.split_at_mut(n);
            literal.copy_from_slice(&self.container.literals[from..from + n]);
            (at, to) = (at + n as u64, rest);
            next += 1;
        }
        Ok(())
    }

    /// The CRC-32 of the parts of arrays that lie in a piece of the file.
    fn part_sums(&self, at: u64, piece: &[u8]) -> Vec<PartSum> {
        let starts = &self.container.starts;
        let end = at + piece.len() as u64;
        let first = starts
            .partition_point(|start| *start <= at)
            .saturating_sub(1);
        let last = starts.partition_point(|start| *start < end);
        let parts = (first..last).filter_map(|array| {
            let array_end = starts[array] + self.plan.arrays()[array].n_bytes();
            let (from, to) = (starts[array].max(at), array_end.min(end));
            (from < to).then(|| {
                let bytes = &piece[(from - at) as usize..(to - at) as usize];
                PartSum {
                    array,
                    is_first: from == starts[array],
                    n_bytes: to - from,
                    crc: checksum(CrcAlgorithm::Crc32IsoHdlc, bytes) as u32,
                }
            })
        });
        parts.collect()
    }

    /// The sums of which a byte lies in a range of the file.
    fn sums_in(&self, start: u64, end: u64) -> &[Sum] {
        let sums = &self.container.sums;
        let first = sums.partition_point(|sum| sum.at + 4 <= start);
        let last = sums.partition_point(|sum| sum.at < end);
        &sums[first..last]
    }
}

/// The CRC-32 of the part of an array that lies in one piece.
struct PartSum {
    array: usize,
    /// Whether it is the first part of the array.
    is_first: bool,
    n_bytes: u64,
    crc: u32,
}

/// The CRC-32 of the arrays, joined from their parts in the order of the pieces.
struct ArraySums {
    state: Mutex<SumState>,
    changed: Condvar,
}

struct SumState {
    /// All pieces before this byte are included.
    end: u64,
    /// Parts of pieces that were filled before an earlier piece, by the start of the piece.
    early: BTreeMap<u64, Vec<PartSum>>,
    /// By array.
    crcs: Vec<u32>,
    /// A piece could not be filled: the sums behind it never become known.
    failed: bool,
}

impl ArraySums {
    fn new(n_arrays: usize) -> Self {
        Self {
            state: Mutex::new(SumState {
                end: 0,
                early: BTreeMap::new(),
                crcs: vec![0; n_arrays],
                failed: false,
            }),
            changed: Condvar::new(),
        }
    }

    fn add(&self, at: u64, parts: Vec<PartSum>) {
        let mut guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *guard;
        state.early.insert(at, parts);
        while let Some(parts) = state.early.remove(&state.end) {
            for part in parts {
                let crc = &mut state.crcs[part.array];
                *crc = if part.is_first {
                    part.crc
                } else {
                    let (before, own) = (u64::from(*crc), u64::from(part.crc));
                    checksum_combine(CrcAlgorithm::Crc32IsoHdlc, before, own, part.n_bytes) as u32
                };
            }
            state.end += PIECE_BYTES as u64;
        }
        self.changed.notify_all();
    }

    fn fail(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failed = true;
        self.changed.notify_all();
    }

    /// Waits for all pieces up to the one at `at`, and writes the sums in it. False if one of them failed.
    fn fill(&self, sums: &[Sum], at: u64, piece: &mut [u8]) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self
            .changed
            .wait_while(state, |state| state.end <= at && !state.failed)
            .unwrap_or_else(PoisonError::into_inner);
        if state.end <= at {
            return false;
        }
        for sum in sums {
            // A sum can lie across the end of a piece.
            for (i, byte) in (0..).zip(state.crcs[sum.array].to_le_bytes()) {
                let to = (sum.at + i).checked_sub(at).map(|to| to as usize);
                if let Some(to) = to.and_then(|to| piece.get_mut(to)) {
                    *to = byte;
                }
            }
        }
        true
    }
}

/// The source of the bytes of a file.
#[derive(Clone, Copy)]
enum Bytes<'a> {
    Planned(&'a Content<'a>),
    InMemory(&'a [u8]),
}

/// Writes the pieces of a file to a sink.
struct PieceWriter<'a, S> {
    sink: &'a S,
    bytes: Bytes<'a>,
    n_bytes: u64,
    routes: Option<&'a Routes>,
    next: AtomicU64,
    checksums: Vec<AtomicU32>,
    finder: &'a Finder,
    /// For files with sums of arrays.
    array_sums: Option<ArraySums>,
    fill_permits: Semaphore,
    /// Held while new memory is touched.
    touching: Mutex<()>,
    control: &'a Control,
}

impl<'a, S: Sink> PieceWriter<'a, S> {
    /// At most as many pieces are filled concurrently as the current pool has threads.
    fn new(
        sink: &'a S,
        bytes: Bytes<'a>,
        n_bytes: u64,
        routes: Option<&'a Routes>,
        finder: &'a Finder,
        control: &'a Control,
    ) -> Self {
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
            n_bytes,
            routes,
            next: AtomicU64::new(0),
            checksums: (0..n_chunks).map(|_| AtomicU32::new(0)).collect(),
            finder,
            array_sums: match bytes {
                Bytes::Planned(content) if !content.container.sums.is_empty() => {
                    Some(ArraySums::new(content.plan.arrays().len()))
                }
                _ => None,
            },
            fill_permits: Semaphore::new(n_at_once),
            touching: Mutex::new(()),
            control,
        }
    }

    /// Writes all pieces with one thread per buffer, and returns the checksums of the chunks.
    fn write(self, mut buffers: Vec<Buffer<'_>>) -> Result<Vec<u32>> {
        if let [buffer] = &mut buffers[..] {
            // Starting a thread takes longer than writing a small file.
            self.write_some(buffer.memory)?;
            return Ok(self
                .checksums
                .into_iter()
                .map(AtomicU32::into_inner)
                .collect());
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
        Ok(self
            .checksums
            .into_iter()
            .map(AtomicU32::into_inner)
            .collect())
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
            if at >= self.n_bytes {
                return Ok(());
            }
            let written = self.write_one(at, buffer);
            if written.is_err() {
                // The other threads stop at their next piece.
                self.next.store(self.n_bytes, Ordering::Relaxed);
                return written;
            }
        }
    }

    fn write_one(&self, at: u64, buffer: &mut [u8]) -> Result<()> {
        let len = (self.n_bytes - at).min(PIECE_BYTES as u64) as usize;
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
                self.fill_piece(content, at, piece)?;
                if let Some(sums) = &self.array_sums {
                    sums.add(at, content.part_sums(at, piece));
                    // A thread that waits for earlier pieces holds no permit: they may need it.
                    permit = None;
                    let here = content.sums_in(at, at + len as u64);
                    if !here.is_empty() && !sums.fill(here, at, piece) {
                        return Ok(()); // the thread that failed returns the error
                    }
                    self.sum_chunks(at, piece);
                }
                std::mem::forget(unfilled);
                piece
            }
        };
        drop(permit);
        let write = |route| self.sink.write_at(at, piece, route);
        match self.routes {
            None => write(Route::Direct),
            Some(routes) => routes.write(len as u64, write),
        }?;
        if let Bytes::InMemory(_) = self.bytes {
            self.control.advance(len as u64); // `fill_band` counts the bytes of the other kind
        }
        Ok(())
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
            content.fill_band(at, band, Stores::Plain, self.control)?;
            if self.array_sums.is_none() {
                self.sum_chunks(at, band);
            }
        }
        Ok(())
    }

    /// Computes the checksums of the chunks from `at` on, and looks for values that are not finite.
    fn sum_chunks(&self, at: u64, bytes: &[u8]) {
        let checksums = &self.checksums[at as usize / CHUNK_BYTES..];
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

/// A file under a temporary name. It is removed on drop unless it was published.
pub(crate) struct TemporaryFile {
    path: PathBuf,
    /// The name under which it is published.
    target: PathBuf,
    buffered: File,
    direct: Option<File>,
    /// Whether pieces may take either route.
    has_routes: bool,
    is_durable: bool,
    is_published: bool,
}

/// A hidden name that no other process uses, also on another host, and that does not end in `.safetensors`, so that
/// readers ignore the file.
fn temporary_name(name: &str) -> String {
    const MAX_BYTES: usize = 255; // of a name in a folder
    let random = RandomState::new().hash_one(std::process::id());
    let end = format!(".{random:016x}.tmp");
    let mut kept = name.len().min(MAX_BYTES - 1 - end.len());
    while !name.is_char_boundary(kept) {
        kept -= 1;
    }
    format!(".{}{end}", &name[..kept])
}

impl TemporaryFile {
    pub(crate) fn create(path: &Path, n_bytes: u64, options: &Options) -> Result<Self> {
        let name = path.file_name().ok_or_else(|| {
            Error::new(
                Kind::Argument,
                format!("{} is not the path of a file", path.display()),
            )
        })?;
        let temporary = path.with_file_name(temporary_name(&name.to_string_lossy()));
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        // The type has 16 bits on macOS.
        let mode = Mode::from_raw_mode(options.mode as rustix::fs::RawMode);
        let opened = retry_on_intr(|| rustix::fs::open(&temporary, flags, mode));
        let buffered =
            opened.map_err(|errno| Error::io("cannot create", &temporary, &errno.into()))?;
        let mut this = Self {
            path: temporary,
            target: path.to_owned(),
            buffered: File::from(buffered),
            direct: None,
            has_routes: false,
            is_durable: options.durable,
            is_published: false,
        };
        // Small files too: a network file system may report a full disk when a file is closed, which goes unseen.
        let is_reserved = this.reserve(n_bytes)?;
        if options.direct && n_bytes >= PIECE_BYTES as u64 {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            // tmpfs and some network file systems do not support it. Then all writes are buffered.
            this.direct = open_direct(&this.path, flags);
        }
        // Without reserved space, a full disk may only be seen when the page cache is written, after the last write.
        this.has_routes = is_reserved && this.direct.is_some() && !options.durable;
        Ok(this)
    }

    /// Reserves space: a full disk is an error before anything is written. False if the file system cannot do it.
    fn reserve(&self, n_bytes: u64) -> Result<bool> {
        // A range must not be empty, and a file without bytes stays one.
        let (flags, len) = match n_bytes {
            0 => (FallocateFlags::KEEP_SIZE, 1),
            n => (FallocateFlags::empty(), n),
        };
        match retry_on_intr(|| rustix::fs::fallocate(&self.buffered, flags, 0, len)) {
            Ok(()) => Ok(true),
            Err(
                rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS | rustix::io::Errno::INVAL,
            ) => Ok(false),
            Err(errno) => Err(Error::io(
                &format!("cannot reserve {n_bytes} bytes for"),
                &self.target,
                &errno.into(),
            )
            .hint(write_hint(Some(errno.raw_os_error())))),
        }
    }
}

impl Sink for TemporaryFile {
    fn has_routes(&self) -> bool {
        self.has_routes
    }

    fn write_at(&self, at: u64, bytes: &[u8], route: Route) -> Result<()> {
        let failed = |error: std::io::Error| {
            let hint = write_hint(error.raw_os_error());
            Error::io("cannot write", &self.path, &error).hint(hint)
        };
        let direct = self.direct.as_ref().filter(|_| route == Route::Direct);
        let direct_len = if direct.is_some() {
            bytes.len() / DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES
        } else {
            0
        };
        let (aligned, tail) = bytes.split_at(direct_len);
        if let Some(direct) = direct
            && !aligned.is_empty()
        {
            match direct.write_all_at(aligned, at) {
                // The device requires a larger alignment: the write is buffered.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) =>
                {
                    self.buffered.write_all_at(aligned, at).map_err(failed)?;
                }
                other => other.map_err(failed)?,
            }
        }
        if !tail.is_empty() {
            self.buffered
                .write_all_at(tail, at + direct_len as u64)
                .map_err(failed)?;
        }
        Ok(())
    }

    fn publish(mut self) -> Result<()> {
        if self.is_durable {
            // After a failed sync the state of the pages is undefined. The file is removed and never synced again.
            self.buffered
                .sync_all()
                .map_err(|error| Error::io("cannot sync", &self.path, &error))?;
        }
        std::fs::rename(&self.path, &self.target)
            .map_err(|error| Error::io("cannot rename to", &self.target, &error))?;
        self.is_published = true;
        if self.is_durable {
            sync_folder(
                self.target
                    .parent()
                    .filter(|p| !p.as_os_str().is_empty())
                    .unwrap_or(Path::new(".")),
            )?;
        }
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.is_published {
            // The caller gets the first error; an error of the removal is ignored.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Renames a file or folder to an unused name, or exchanges two names atomically.
///
/// If the file system cannot exchange names, `to` is renamed to `<from>.old`, `from` to `to`, and `<from>.old` to
/// `from`. After a crash in between, both exist under two of these three names.
pub fn rename(from: &Path, to: &Path, exchange: bool) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    let flags = if exchange {
        RenameFlags::EXCHANGE
    } else {
        RenameFlags::NOREPLACE
    };
    match renameat_with(CWD, from, CWD, to, flags) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        other => return other.map_err(Into::into),
    }
    if !exchange {
        if to.try_exists()? {
            return Err(Errno::EXIST.into());
        }
        return std::fs::rename(from, to);
    }
    let mut old = from.as_os_str().to_owned();
    old.push(".old");
    std::fs::rename(to, &old)?;
    if let Err(error) = std::fs::rename(from, to) {
        std::fs::rename(&old, to)?;
        return Err(error);
    }
    std::fs::rename(&old, from)
}

/// Makes files and the entries of folders durable, on the current thread pool: a journal commits once what is synced
/// at one time.
///
/// A symbolic link in the place of a file is an error. The error is that of the first path that failed, with its index
/// in `files` followed by `folders`; after it none of them counts as durable, and none may be synced again.
pub fn sync_together(files: &[PathBuf], folders: &[PathBuf]) -> SyncResult {
    let failed: Vec<_> = (0..files.len() + folders.len())
        .into_par_iter()
        .with_max_len(1)
        .filter_map(|index| sync_one(files, folders, index).err())
        .collect();
    failed.into_iter().next().map_or(Ok(()), Err)
}

/// As [`sync_together`], one after the other on the calling thread.
///
/// # Errors
/// As [`sync_together`].
pub fn sync_in_turn(files: &[PathBuf], folders: &[PathBuf]) -> SyncResult {
    (0..files.len() + folders.len()).try_for_each(|index| sync_one(files, folders, index))
}

/// The number of the path that could not be synced, the folders after the files, and why.
pub type SyncResult = std::result::Result<(), (usize, std::io::Error)>;

fn sync_one(files: &[PathBuf], folders: &[PathBuf], index: usize) -> SyncResult {
    let open = |path: &Path, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
    let opened = match files.get(index) {
        // Some network file systems sync only what is open for writing.
        Some(file) => open(file, OFlags::RDWR | OFlags::NOFOLLOW).or_else(|errno| {
            if matches!(errno, rustix::io::Errno::ACCESS | rustix::io::Errno::PERM) {
                return open(file, OFlags::RDONLY | OFlags::NOFOLLOW);
            }
            Err(errno)
        }),
        None => open(
            &folders[index - files.len()],
            OFlags::RDONLY | OFlags::DIRECTORY,
        ),
    };
    let synced = opened
        .map_err(std::io::Error::from)
        .and_then(|handle| File::from(handle).sync_all());
    synced.map_err(|error| (index, error))
}

/// Syncs the entries of a folder.
pub fn sync_folder(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|folder| folder.sync_all());
    synced.map_err(|error| Error::io("cannot sync folder", path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn touched(buffers: &mut Buffers, n_bytes: u64) -> Vec<usize> {
        let (pieces, _) = buffers.for_file(n_bytes).unwrap();
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
