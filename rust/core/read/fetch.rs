//! How the bytes of a copy are fetched: borrowed from a map, read into the destination, or read into scratch memory.
//! Where checksums are known, the bytes are verified before they are copied.

use crate::bytes::memory::{Stores, copy_run};
use crate::bytes::strided::{Dim, copy_box, is_one_run, source_run, src_span, widest, without};
use crate::check::verify::{Checks, ResidentRange, read_chunks, verify_chunks};
use crate::control::Control;
use crate::error::Result;
use crate::files::checksum::{CHUNK_BYTES, Checksums};
use crate::files::shard_file::ShardFile;
use crate::files::source::Source;
use crate::planning::plan::{CopyOp, Plan, PlanSource};
use crate::read::readahead::{MIN_GAP_BYTES, SCRATCH_BYTES, skips_gaps};
use crate::read::window::Early;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Gaps between runs are not fetched if the runs have at least this size. Behind shorter runs only large gaps are not.
const LONG_RUN_BYTES: u64 = 4096;
/// Runs with gaps between them are read instead of mapped up to this size.
const SCATTERED_RUN_BYTES: u64 = 256 << 10;
/// Runs of a mapped file are read from this size on, if memory in use is filled.
const LONG_READ_BYTES: u64 = 64 << 10;
/// The range of a larger copy is unmapped by the thread that copied it, if it took at least [`SLOW_TO_MAP`] to map it.
const RELEASED_BYTES: u64 = 256 << 10;
/// Copies of up to this size fault in the chunk around them, if it is in memory.
const MAX_AROUND_BYTES: u64 = 64 << 10;
/// To unmap a range interrupts the other processors, which takes 30 to 60 microseconds on a virtual machine. Large folios
/// are mapped in less, and unmapped in even less when the map is closed.
const SLOW_TO_MAP: Duration = Duration::from_micros(64);

thread_local! {
    /// Memory for chunks that cannot be read into the destination.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// What all bands of one execution of a plan share.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) plan: &'a Plan<'a>,
    pub(crate) checks: &'a Checks,
    pub(crate) stores: Stores,
    pub(crate) control: &'a Control,
    pub(crate) faulted: &'a Faulted,
    /// What was fetched early from remote sources.
    pub(crate) window: Option<&'a dyn Early>,
}

impl Run<'_> {
    /// Reads a range of a source: from what was fetched early, if it is there.
    fn read_at(self, number: u32, source: &Source, start: u64, to: &mut [u8]) -> Result<()> {
        if self
            .window
            .is_some_and(|window| window.read_at(number, start, to))
        {
            return Ok(());
        }
        self.control.fetched(to.len() as u64);
        source.read_at(start, to)
    }
}

/// What a band has faulted in.
#[derive(Default)]
pub(crate) struct Faulted {
    /// The chunks of each source that were faulted in shortly before, by its number and theirs. Many small copies read
    /// from the same chunk, and each call of the system takes longer than such a copy.
    chunks: RefCell<HashSet<(u32, u64)>>,
    /// Whether a range of the current copy took long.
    was_slow: Cell<bool>,
}

impl Faulted {
    /// As [`Source::bytes`].
    fn map<'a>(&self, source: &'a Source, start: u64, len: u64) -> Result<Option<&'a [u8]>> {
        let begin = Instant::now();
        let bytes = source.bytes(start, len)?;
        if begin.elapsed() >= SLOW_TO_MAP {
            self.was_slow.set(true);
        }
        Ok(bytes)
    }

    /// The chunks around a range of a mapped file that is verified, faulted in; `None` if the file is not mapped.
    fn around<'a>(
        &self,
        source: u32,
        file: &'a ShardFile,
        range: (u64, u64),
    ) -> Result<Option<ResidentRange<'a>>> {
        let (first, len) = chunks_around(file, range);
        let bytes = if self.has((source, first, len)) {
            file.source().faulted_bytes(first, len)?
        } else {
            let bytes = self.map(file.source(), first, len)?;
            self.add((source, first, len));
            bytes
        };
        Ok(bytes.map(|bytes| ResidentRange::new(first, bytes)))
    }

    /// A range, faulted in; `None` if the file is not mapped. With a short range, the rest of its chunk is faulted in
    /// as well, if it is in memory.
    fn bytes<'a>(
        &self,
        source: u32,
        file: &'a ShardFile,
        range: (u64, u64),
    ) -> Result<Option<&'a [u8]>> {
        let of_file = file.source();
        if range.1 > MAX_AROUND_BYTES || !of_file.is_file_map() {
            return self.map(of_file, range.0, range.1);
        }
        let (first, len) = chunks_around(file, range);
        if !self.has((source, first, len)) {
            if !of_file.is_resident(first, len) {
                return self.map(of_file, range.0, range.1);
            }
            self.map(of_file, first, len)?;
            self.add((source, first, len));
        }
        of_file.faulted_bytes(range.0, range.1)
    }

    fn has(&self, (source, first, len): (u32, u64, u64)) -> bool {
        let known = self.chunks.borrow();
        chunk_numbers(first, len).all(|chunk| known.contains(&(source, chunk)))
    }

    fn add(&self, (source, first, len): (u32, u64, u64)) {
        let chunks = chunk_numbers(first, len).map(|chunk| (source, chunk));
        self.chunks.borrow_mut().extend(chunks);
    }
}

/// First byte and length of the chunks that hold a range of a file.
fn chunks_around(file: &ShardFile, (start, len): (u64, u64)) -> (u64, u64) {
    let first = start / CHUNK_BYTES as u64 * CHUNK_BYTES as u64;
    let end = (start + len).next_multiple_of(CHUNK_BYTES as u64);
    (first, end.min(file.source().n_bytes()) - first)
}

fn chunk_numbers(first: u64, len: u64) -> Range<u64> {
    first / CHUNK_BYTES as u64..(first + len).div_ceil(CHUNK_BYTES as u64)
}

/// Executes one copy of a plan, box by box, into a part of an array.
pub(crate) struct BoxCopy<'a> {
    run: Run<'a>,
    source: &'a PlanSource<'a>,
    copy_op: &'a CopyOp,
    unit_bytes: u64,
    /// The part of a mapped, verified source that is already faulted in.
    resident: Option<ResidentRange<'a>>,
    to: &'a mut [u8],
}

impl<'a> BoxCopy<'a> {
    /// A copy into a slice, in units of `unit_bytes`.
    pub(crate) fn new(
        run: Run<'a>,
        copy_op: &'a CopyOp,
        unit_bytes: u64,
        to: &'a mut [u8],
    ) -> Self {
        Self {
            run,
            source: run.plan.source(copy_op),
            copy_op,
            unit_bytes,
            resident: None,
            to,
        }
    }

    /// Copies a box from unit `src` of the copy to unit `dst` of the slice.
    pub(crate) fn copy(&mut self, dims: &[Dim], src: u64, dst: u64) -> Result<()> {
        let n: u64 = dims.iter().map(|dim| dim.len).product();
        let (start, span) = self.source_range(dims, src);
        self.run.faulted.was_slow.set(false);
        if self.descends(dims) {
            self.copy_descending(dims, src, dst)?;
        } else {
            self.copy_ascending(dims, src, dst)?;
        }
        if self.run.faulted.was_slow.get()
            && n * self.unit_bytes >= RELEASED_BYTES
            && let PlanSource::File(_, file) = self.source
        {
            file.source().release(start, span);
        }
        Ok(())
    }

    /// Copies a box in parts, the last one first; parts of a run end with chunks of the file.
    fn copy_descending(&mut self, dims: &[Dim], src: u64, dst: u64) -> Result<()> {
        let Some(&outer) = dims.first() else {
            return self.copy_ascending(dims, src, dst);
        };
        let n = (CHUNK_BYTES as u64 / (outer.dst * self.unit_bytes)).max(1);
        let (start, _) = self.source_range(dims, src);
        let is_run = outer.src == 1 && (CHUNK_BYTES as u64).is_multiple_of(self.unit_bytes);
        let first_at = if is_run {
            start / self.unit_bytes % n
        } else {
            0
        };
        let mut end = outer.len;
        while end > 0 {
            let begin = ((end + first_at - 1) / n * n).saturating_sub(first_at);
            let mut part = dims.to_vec();
            part[0].len = end - begin;
            self.copy_ascending(&part, src + begin * outer.src, dst + begin * outer.dst)?;
            end = begin;
        }
        Ok(())
    }

    /// Whether ranges of the source are borrowed. Otherwise each part of a copy would take a positioned read of its own.
    fn is_borrowable(&self) -> bool {
        match self.source {
            PlanSource::Memory(_) => true,
            PlanSource::File(_, file) => file.source().is_mapped(),
        }
    }

    /// Whether the last part of a copy is the first one. The system clears a new page before it is written, and what it
    /// cleared last is still in the cache. Plain runs gain nothing by it: each part is mapped by a call of its own.
    fn descends(&self, dims: &[Dim]) -> bool {
        let is_verified = match self.source {
            PlanSource::Memory(_) => false,
            PlanSource::File(_, file) => {
                let checksums = self.run.checks.checksums(self.copy_op.source, file);
                checksums.is_some()
            }
        };
        self.run.stores == Stores::Fresh
            && (is_verified || !is_one_run(dims))
            && self.is_borrowable()
    }

    /// Whether long runs use non-temporal stores.
    fn streams(&self) -> bool {
        self.run.stores == Stores::Streaming
    }

    /// Whether a run of a mapped file that is not verified is read into its destination, instead of copied out of the
    /// map: into memory that is in use already, and read again soon.
    fn is_read(&self, file: &ShardFile, span: u64) -> bool {
        self.run.stores == Stores::Plain
            && span >= LONG_READ_BYTES
            && file.source().is_mapped()
            && file.source().may_read()
    }

    fn copy_ascending(&mut self, dims: &[Dim], src: u64, dst: u64) -> Result<()> {
        if let PlanSource::File(_, file) = self.source
            && let Some(checksums) = self.run.checks.checksums(self.copy_op.source, file)
        {
            // If rows are so far apart that complete chunks between them are skipped, each part faults in its own
            // range.
            let is_dense = dims
                .iter()
                .all(|dim| dim.len == 1 || dim.src * self.unit_bytes < CHUNK_BYTES as u64);
            if is_dense && file.source().is_mapped() {
                let range = self.source_range(dims, src);
                let faulted = self.run.faulted;
                self.resident = faulted.around(self.copy_op.source, file, range)?;
            }
            return self.verified_parts(file, checksums, dims, src, dst);
        }
        self.dense_parts(dims, src, dst, false)
    }

    /// First byte in the source and span in bytes of a box that begins at unit `src` of the copy.
    fn source_range(&self, dims: &[Dim], src: u64) -> (u64, u64) {
        (
            self.copy_op.src_start_bytes + src * self.unit_bytes,
            src_span(dims) * self.unit_bytes,
        )
    }

    /// Copies a box in parts that are verified first. A part is no larger than a chunk, so that it is still in the
    /// cache.
    fn verified_parts(
        &mut self,
        file: &'a ShardFile,
        checksums: &Checksums,
        dims: &[Dim],
        src: u64,
        dst: u64,
    ) -> Result<()> {
        let unit = self.unit_bytes;
        let (start, span) = self.source_range(dims, src);
        let widest = widest(dims);
        // Each positioned read is a system call: it reads more than a chunk at once, unless it would read gaps as well.
        let part = match widest {
            Some((_, dim)) if !file.source().is_mapped() && dim.src * unit < CHUNK_BYTES as u64 => {
                SCRATCH_BYTES
            }
            _ => CHUNK_BYTES as u64,
        };
        let is_one_part = start / part == (start + span - 1) / part;
        let is_whole_chunks = (start | span).is_multiple_of(CHUNK_BYTES as u64);
        if (is_whole_chunks || !is_one_part) && is_one_run(dims) && !file.source().is_mapped() {
            return self.verified_run(file, checksums, start, (dst * unit) as usize, span);
        }
        if let (false, Some((widest, dim))) = (is_one_part, widest) {
            let inner = without(dims, widest);
            let (stride, row_span) = (dim.src * unit, src_span(&inner) * unit);
            let mut k = 0;
            while k < dim.len {
                let row = start + k * stride;
                // The rows that end inside this part. A single row that does not is split further.
                let left = (row / part + 1) * part - row;
                let n = if row_span > left {
                    1
                } else {
                    ((left - row_span) / stride + 1).min(dim.len - k)
                };
                let (at, to) = (src + k * dim.src, dst + k * dim.dst);
                if n == 1 {
                    self.verified_parts(file, checksums, &inner, at, to)?;
                } else {
                    let mut rows = dims.to_vec();
                    rows[widest].len = n;
                    self.verified_part(file, checksums, &rows, at, to)?;
                }
                k += n;
            }
            return Ok(());
        }
        self.verified_part(file, checksums, dims, src, dst)
    }

    /// Copies a box that lies in one part.
    fn verified_part(
        &mut self,
        file: &'a ShardFile,
        checksums: &Checksums,
        dims: &[Dim],
        src: u64,
        dst: u64,
    ) -> Result<()> {
        let range = self.source_range(dims, src);
        let (start, span) = range;
        let mapped = (file, self.resident);
        let Run {
            checks, control, ..
        } = self.run;
        if is_one_run(dims) {
            let at = (dst * self.unit_bytes) as usize;
            let streams = self.streams();
            let to = (&mut self.to[at..at + span as usize], streams);
            if checks.copy_run(self.copy_op.source, mapped, checksums, start, to, control)? {
                return Ok(());
            }
        }
        if let Some(from) = checks.mapped(self.copy_op.source, mapped, checksums, range, control)? {
            self.copy_from(from, dims, dst);
            return Ok(());
        }
        let (run, number) = (self.run, self.copy_op.source);
        let read = |at, to: &mut [u8]| run.read_at(number, file.source(), at, to);
        SCRATCH.with_borrow_mut(|scratch| {
            let at = read_chunks(file, checksums, range, scratch, read)?;
            self.copy_from(&scratch[at..], dims, dst);
            Ok(())
        })
    }

    /// Copies a long run by positioned reads: complete chunks into the destination, both ends through scratch memory.
    fn verified_run(
        &mut self,
        file: &'a ShardFile,
        checksums: &Checksums,
        start: u64,
        at: usize,
        n_bytes: u64,
    ) -> Result<()> {
        let chunk = CHUNK_BYTES as u64;
        let end = start + n_bytes;
        let first = start.next_multiple_of(chunk).min(end);
        // The last chunk of the file may be shorter than the others and is complete.
        let last = if end == checksums.n_bytes() {
            end
        } else {
            (end / chunk * chunk).max(first)
        };
        let (run, source) = (self.run, self.copy_op.source);
        let to = &mut self.to[at..at + n_bytes as usize];
        let (head, rest) = to.split_at_mut((first - start) as usize);
        let (middle, tail) = rest.split_at_mut((last - first) as usize);
        // Each chunk is verified while it is in the cache.
        for (number, middle) in ((first / chunk) as usize..).zip(middle.chunks_mut(CHUNK_BYTES)) {
            run.read_at(source, file.source(), number as u64 * chunk, middle)?;
            verify_chunks(file, checksums, number, middle)?;
        }
        for (from, to) in [(start, head), (last, tail)] {
            if !to.is_empty() {
                SCRATCH.with_borrow_mut(|scratch| {
                    let range = (from, to.len() as u64);
                    let read = |at, to: &mut [u8]| run.read_at(source, file.source(), at, to);
                    let at = read_chunks(file, checksums, range, scratch, read)?;
                    copy_run(to, &scratch[at..at + to.len()], false);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Copies a box from unit `src` of the copy to unit `dst` of the slice. A dense part of the source is fetched at
    /// once.
    fn dense_parts(&mut self, dims: &[Dim], src: u64, dst: u64, is_part: bool) -> Result<()> {
        let (start, span) = self.source_range(dims, src);
        let file = match self.source {
            PlanSource::Memory(bytes) => {
                self.copy_from(&bytes[start as usize..(start + span) as usize], dims, dst);
                return Ok(());
            }
            PlanSource::File(_, file) => file,
        };
        let source = file.source();
        let n: u64 = dims.iter().map(|dim| dim.len).product();
        let useful = n * self.unit_bytes;
        let run = source_run(dims) * self.unit_bytes;
        let gapped = span > useful + useful / 20;
        let skips_gaps = gapped
            && (run >= LONG_RUN_BYTES
                || source.is_file_map()
                    && skips_gaps(dims, self.unit_bytes, MIN_GAP_BYTES).is_some());
        let is_split = if source.is_mapped() {
            // If the range is resident, one range is cheaper than many.
            skips_gaps && (is_part || !source.is_resident(start, span))
        } else {
            gapped && (run >= LONG_RUN_BYTES || span / 8 > useful)
                || span > SCRATCH_BYTES && !is_one_run(dims)
        };
        if let (true, Some((widest, dim))) = (is_split && run < span, widest(dims)) {
            let inner = without(dims, widest);
            for k in 0..dim.len {
                self.dense_parts(&inner, src + k * dim.src, dst + k * dim.dst, true)?;
            }
            return Ok(());
        }
        // Gaps of a resident range were not fetched.
        let fetched = if skips_gaps { useful } else { span };
        // One system call per run, like faulting it in, and it copies the bytes as well.
        let is_scattered = is_one_run(dims)
            && (is_part && span < SCATTERED_RUN_BYTES && source.has_fd()
                || self.is_read(file, span));
        let mapped = if is_scattered {
            None
        } else {
            let (number, faulted) = (self.copy_op.source, self.run.faulted);
            faulted.bytes(number, file, (start, span))?
        };
        let number = self.copy_op.source;
        if let Some(from) = mapped {
            self.run.control.fetched(fetched);
            self.copy_from(from, dims, dst);
        } else if is_scattered || is_one_run(dims) {
            let at = (dst * self.unit_bytes) as usize;
            let to = &mut self.to[at..at + useful as usize];
            self.run.read_at(number, source, start, to)?;
        } else {
            let mut scratch = vec![0; span as usize];
            self.run.read_at(number, source, start, &mut scratch)?;
            self.copy_from(&scratch, dims, dst);
        }
        Ok(())
    }

    /// Copies a box to unit `dst` of the slice; `from` begins at the first element of the box.
    fn copy_from(&mut self, from: &[u8], dims: &[Dim], dst: u64) {
        let streams = self.streams();
        let to = &mut self.to[(dst * self.unit_bytes) as usize..];
        copy_box(from, to, dims, self.unit_bytes, streams);
    }
}
