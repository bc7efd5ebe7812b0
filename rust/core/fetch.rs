//! How the bytes of a copy are fetched: borrowed from a map, read into the destination, or read into scratch memory.
//! Where checksums are known, the bytes are verified before they are copied.

use crate::checksum::{CHUNK_BYTES, Checksums};
use crate::control::Control;
use crate::error::Result;
use crate::memory::{Stores, copy_run};
use crate::plan::{CopyOp, Plan, PlanSource};
use crate::shard_file::ShardFile;
use crate::source::Source;
use crate::strided::{Dim, copy_box, is_one_run, source_run, src_span, widest, without};
use crate::verify::{Checks, ResidentRange, read_chunks, verify_chunks};
use std::cell::RefCell;

/// Gaps between runs are not fetched if the runs have at least this size.
const LONG_RUN_BYTES: u64 = 4096;
/// Runs with gaps between them are read instead of mapped up to this size.
const SCATTERED_RUN_BYTES: u64 = 256 << 10;
/// The most that a positioned read fetches into scratch memory at once.
const SCRATCH_BYTES: u64 = 1 << 20;

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
}

/// Executes one copy of a plan, box by box, into a part of an array.
pub(crate) struct BoxCopy<'a> {
    run: Run<'a>,
    source: &'a PlanSource<'a>,
    copy_op: &'a CopyOp,
    unit_bytes: u64,
    /// The source and its checksums, if it is verified.
    verified: Option<(&'a ShardFile, &'a Checksums)>,
    /// The part of a mapped, verified source that is already faulted in.
    resident: Option<ResidentRange<'a>>,
    to: &'a mut [u8],
}

/// Bytes of a box in its source.
struct Extent {
    /// From the first to the last byte.
    span: u64,
    /// Without the gaps.
    useful: u64,
    /// The longest run.
    run: u64,
}

impl Extent {
    fn new(dims: &[Dim], unit_bytes: u64) -> Self {
        Self {
            span: src_span(dims) * unit_bytes,
            useful: dims.iter().map(|dim| dim.len).product::<u64>() * unit_bytes,
            run: source_run(dims) * unit_bytes,
        }
    }

    fn has_gaps(&self) -> bool {
        self.span > self.useful + self.useful / 20
    }
}

impl<'a> BoxCopy<'a> {
    /// A copy into a slice, in units of `unit_bytes`.
    pub(crate) fn new(
        run: Run<'a>,
        copy_op: &'a CopyOp,
        unit_bytes: u64,
        to: &'a mut [u8],
    ) -> Self {
        let source = run.plan.source(copy_op);
        let verified = match source {
            PlanSource::File(_, file) => {
                let checksums = run.checks.checksums(copy_op.source, file);
                checksums.map(|checksums| (&**file, checksums))
            }
            PlanSource::Memory(_) => None,
        };
        Self {
            run,
            source,
            copy_op,
            unit_bytes,
            verified,
            resident: None,
            to,
        }
    }

    /// Copies a box from unit `src` of the copy to unit `dst` of the slice.
    pub(crate) fn copy(&mut self, dims: &[Dim], src: u64, dst: u64) -> Result<()> {
        if let Some((file, checksums)) = self.verified
            && file.source().is_mapped()
        {
            // If rows are so far apart that complete chunks between them are skipped, each part faults in its own
            // range.
            let is_dense = dims
                .iter()
                .all(|dim| dim.len == 1 || dim.src * self.unit_bytes < CHUNK_BYTES as u64);
            if is_dense {
                self.resident = Checks::prefault(file, checksums, self.source_range(dims, src))?;
            }
        }
        self.copy_parts(dims, src, dst, false)
    }

    /// First byte in the source and span in bytes of a box that begins at unit `src` of the copy.
    fn source_range(&self, dims: &[Dim], src: u64) -> (u64, u64) {
        (
            self.copy_op.src_start_bytes + src * self.unit_bytes,
            src_span(dims) * self.unit_bytes,
        )
    }

    /// Copies a box in one or several parts. With `is_row` it is a row of a larger box.
    ///
    /// A box is split along the dim with the largest stride in the source. One part has the rows that end in the same
    /// block of the source, with blocks of [`Self::block_bytes`]. A row that does not end in its block is split further.
    fn copy_parts(&mut self, dims: &[Dim], src: u64, dst: u64, is_row: bool) -> Result<()> {
        let block = self.block_bytes(dims, src, is_row);
        let (Some(block), Some((widest, dim))) = (block, widest(dims)) else {
            return self.copy_part(dims, src, dst, is_row);
        };
        let inner = without(dims, widest);
        let (start, _) = self.source_range(dims, src);
        let stride = dim.src * self.unit_bytes;
        let row_span = src_span(&inner) * self.unit_bytes;
        let mut k = 0;
        while k < dim.len {
            let row = start + k * stride;
            let left = (row / block + 1) * block - row;
            let n = if row_span > left {
                1
            } else {
                ((left - row_span) / stride + 1).min(dim.len - k)
            };
            let (at, to) = (src + k * dim.src, dst + k * dim.dst);
            if n == 1 {
                self.copy_parts(&inner, at, to, true)?;
            } else {
                let mut rows = dims.to_vec();
                rows[widest].len = n;
                self.copy_part(&rows, at, to, true)?;
            }
            k += n;
        }
        Ok(())
    }

    /// The size of the blocks of the source by which a box is split; `None` if it is one part.
    fn block_bytes(&self, dims: &[Dim], src: u64, is_row: bool) -> Option<u64> {
        let PlanSource::File(_, file) = self.source else {
            return None;
        };
        let source = file.source();
        let range = self.source_range(dims, src);
        if self.verified.is_some() {
            return self.verified_block_bytes(source, dims, range);
        }
        let extent = Extent::new(dims, self.unit_bytes);
        let has_gaps = extent.has_gaps();
        let is_split = if source.is_mapped() {
            // If the range is resident, one range is cheaper than many.
            has_gaps
                && extent.run >= LONG_RUN_BYTES
                && (is_row || !source.is_resident(range.0, range.1))
        } else {
            has_gaps && (extent.run >= LONG_RUN_BYTES || extent.span / 8 > extent.useful)
                || extent.span > SCRATCH_BYTES && !is_one_run(dims)
        };
        // Every row is a part.
        (is_split && extent.run < extent.span).then_some(1)
    }

    /// As [`Self::block_bytes`] for a verified source: blocks are no larger than a chunk, so that a part is copied while
    /// it is in the cache.
    fn verified_block_bytes(
        &self,
        source: &Source,
        dims: &[Dim],
        (start, span): (u64, u64),
    ) -> Option<u64> {
        let is_mapped = source.is_mapped();
        // A long run into new pages is copied at once, after all its chunks are verified: memcpy bypasses the cache for
        // such lengths, which saves more than it costs to read the source again from the last-level cache. Positioned
        // reads fetch a run directly into the destination.
        if is_one_run(dims) && (!is_mapped || self.run.stores == Stores::Fresh) {
            return None;
        }
        // Each positioned read is a system call: it reads more than a chunk at once, unless it would read gaps as well.
        let has_near_rows =
            widest(dims).is_some_and(|(_, dim)| dim.src * self.unit_bytes < CHUNK_BYTES as u64);
        let block = if !is_mapped && has_near_rows {
            SCRATCH_BYTES
        } else {
            CHUNK_BYTES as u64
        };
        (start / block != (start + span - 1) / block).then_some(block)
    }

    /// Copies a box that is one part.
    fn copy_part(&mut self, dims: &[Dim], src: u64, dst: u64, is_row: bool) -> Result<()> {
        let range = self.source_range(dims, src);
        match (self.source, self.verified) {
            (PlanSource::Memory(bytes), _) => {
                let (start, span) = (range.0 as usize, range.1 as usize);
                self.copy_from(&bytes[start..start + span], dims, dst);
                Ok(())
            }
            (PlanSource::File(..), Some((file, checksums))) => {
                self.copy_verified(file, checksums, dims, range, dst)
            }
            (PlanSource::File(_, file), None) => {
                self.copy_unverified(file.source(), dims, range.0, dst, is_row)
            }
        }
    }

    fn copy_verified(
        &mut self,
        file: &'a ShardFile,
        checksums: &Checksums,
        dims: &[Dim],
        range: (u64, u64),
        dst: u64,
    ) -> Result<()> {
        let (start, span) = range;
        let mapped = (file, self.resident);
        let Run {
            checks,
            stores,
            control,
            ..
        } = self.run;
        if is_one_run(dims) {
            let at = (dst * self.unit_bytes) as usize;
            let is_long = start / SCRATCH_BYTES != (start + span - 1) / SCRATCH_BYTES;
            if is_long && !file.source().is_mapped() {
                return self.read_verified_run(file, checksums, start, at, span);
            }
            let to = (&mut self.to[at..at + span as usize], stores);
            if checks.copy_run(self.copy_op.source, mapped, checksums, start, to, control)? {
                return Ok(());
            }
        }
        if let Some(from) = checks.mapped(self.copy_op.source, mapped, checksums, range, control)? {
            self.copy_from(from, dims, dst);
            return Ok(());
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let at = read_chunks(file, checksums, range, scratch, control)?;
            self.copy_from(&scratch[at..], dims, dst);
            Ok(())
        })
    }

    /// Copies a long run by positioned reads: complete chunks into the destination, both ends through scratch memory.
    fn read_verified_run(
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
        let Run {
            stores, control, ..
        } = self.run;
        let to = &mut self.to[at..at + n_bytes as usize];
        let (head, rest) = to.split_at_mut((first - start) as usize);
        let (middle, tail) = rest.split_at_mut((last - first) as usize);
        if !middle.is_empty() {
            file.source().read_at(first, middle)?;
            control.fetched(middle.len() as u64);
            verify_chunks(file, checksums, (first / chunk) as usize, middle)?;
        }
        for (from, to) in [(start, head), (last, tail)] {
            if !to.is_empty() {
                SCRATCH.with_borrow_mut(|scratch| {
                    let range = (from, to.len() as u64);
                    let at = read_chunks(file, checksums, range, scratch, control)?;
                    copy_run(to, &scratch[at..at + to.len()], stores);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    fn copy_unverified(
        &mut self,
        source: &Source,
        dims: &[Dim],
        start: u64,
        dst: u64,
        is_row: bool,
    ) -> Result<()> {
        let extent = Extent::new(dims, self.unit_bytes);
        // Gaps of a resident range are not fetched.
        let fetched = if extent.has_gaps() && extent.run >= LONG_RUN_BYTES {
            extent.useful
        } else {
            extent.span
        };
        self.run.control.fetched(fetched);
        let is_one_run = is_one_run(dims);
        // One system call per run, like faulting it in, and it copies the bytes as well.
        let is_scattered =
            is_row && extent.span < SCATTERED_RUN_BYTES && source.has_fd() && is_one_run;
        let mapped = if is_scattered {
            None
        } else {
            source.bytes(start, extent.span)?
        };
        if let Some(from) = mapped {
            self.copy_from(from, dims, dst);
        } else if is_one_run {
            let at = (dst * self.unit_bytes) as usize;
            source.read_at(start, &mut self.to[at..at + extent.useful as usize])?;
        } else {
            let mut scratch = vec![0; extent.span as usize];
            source.read_at(start, &mut scratch)?;
            self.copy_from(&scratch, dims, dst);
        }
        Ok(())
    }

    /// Copies a box to unit `dst` of the slice; `from` begins at the first element of the box.
    fn copy_from(&mut self, from: &[u8], dims: &[Dim], dst: u64) {
        let to = &mut self.to[(dst * self.unit_bytes) as usize..];
        copy_box(from, to, dims, self.unit_bytes, self.run.stores);
    }
}
