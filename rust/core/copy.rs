//! Carrying out a plan: bands of the destination, filled in parallel.
//!
//! The destination is cut into bands of about 2 MiB by bytes, whatever tensors or files they belong to, and each band
//! is a slice that one worker owns. For a band the pieces that touch it are restricted to it, the source range of each
//! is brought in (or read), and strided runs are copied. Sources are visited so that a range is fetched as one where
//! it is dense, and run by run where the gaps between runs are worth leaving out.
//!
//! In plain words:
//!
//! ```text
//! for each band in parallel:
//!     for each piece that touches the band:
//!         for each box of the piece inside the band:      # at most 2 n - 1
//!             for each dense part of the box:             # all of it, or run by run
//!                 fetch its source range; copy its runs
//!     zero the padding; cast if asked
//! ```

use crate::checksum::{CHUNK_BYTES, Sums};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::memory::{Stores, copy_run, finish_stores, prefetch};
use crate::plan::{Array, Dim, Piece, Plan, PlanSource, dst_span, src_span};
use crate::shard_file::ShardFile;
use crate::verify::{Checks, Present, prove, prove_files, read_chunks};
use half::{bf16, f16};
use rayon::prelude::*;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const BAND_BYTES: u64 = 2 << 20;
/// Gaps between runs of at least this size are not fetched.
const LONG_RUN_BYTES: u64 = 4096;
/// Runs with gaps between them are read, not mapped, up to this size.
const SCATTERED_RUN_BYTES: u64 = 256 << 10;
/// How far ahead of a copy of short runs its source is brought near, in bytes of runs.
const PREFETCH_BYTES: usize = 8192;
/// The most that a positioned read fetches into scratch memory at once.
const SCRATCH_BYTES: u64 = 1 << 20;

thread_local! {
    /// Where chunks are read that cannot be read to where they belong.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// What a running copy shows and obeys.
#[derive(Debug, Default)]
pub struct Control {
    cancelled: AtomicBool,
    done_bytes: AtomicU64,
    fetched_bytes: AtomicU64,
}

impl Control {
    /// Asks the copy to stop at the next band.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Bytes of the destination that are filled.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that were fetched of the sources.
    pub fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn fetched(&self, n_bytes: u64) {
        self.fetched_bytes.fetch_add(n_bytes, Ordering::Relaxed);
    }

    pub(crate) fn advance(&self, n_bytes: u64) {
        self.done_bytes.fetch_add(n_bytes, Ordering::Relaxed);
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::new(Kind::Cancelled, "cancelled"));
        }
        Ok(())
    }
}

/// Fills one slice an array, each of the array's bytes, on the current rayon pool.
pub fn fill(plan: &Plan<'_>, out: Vec<&mut [u8]>, stores: Stores, control: &Control) -> Result<()> {
    if out.len() != plan.arrays().len() {
        return Err(Error::new(
            Kind::Argument,
            format!("{} buffers for {} arrays", out.len(), plan.arrays().len()),
        ));
    }
    let mut bands: Vec<Vec<Band<'_>>> = vec![Vec::new()];
    let mut room = BAND_BYTES;
    for (array, mut rest) in plan.arrays().iter().zip(out) {
        if rest.len() as u64 != array.n_bytes() {
            let message = format!(
                "the buffer of `{}` has {} bytes, {} are needed",
                array.name,
                rest.len(),
                array.n_bytes()
            );
            return Err(Error::new(Kind::Argument, message).key(&array.name));
        }
        let mut start = 0;
        while !rest.is_empty() {
            let whole_units = |bytes: u64| bytes / array.unit_bytes() * array.unit_bytes();
            if rest.len() as u64 >= BAND_BYTES {
                // Two threads that touch one fresh huge page wait for each other: bands of large arrays end where pages end.
                room = BAND_BYTES - rest.as_ptr() as u64 % BAND_BYTES;
                if !bands.last().is_some_and(Vec::is_empty) {
                    bands.push(Vec::new());
                }
            }
            let take = whole_units(room)
                .max(array.unit_bytes())
                .min(rest.len() as u64);
            let (to, after) = rest.split_at_mut(take as usize);
            bands
                .last_mut()
                .expect("never empty")
                .push(Band { array, start, to });
            rest = after;
            start += take / array.unit_bytes();
            room = room.saturating_sub(take);
            if room < array.unit_bytes() {
                bands.push(Vec::new());
                room = BAND_BYTES;
            }
        }
    }
    prove_files(plan, control)?;
    let run = Run {
        plan,
        checks: &Checks::new(plan),
        stores,
        control,
    };
    bands.into_par_iter().try_for_each(|band| {
        control.check()?;
        for Band { array, start, to } in band {
            let n_bytes = to.len() as u64;
            fill_units(run, array, start, to)?;
            control.advance(n_bytes);
        }
        finish_stores(stores);
        Ok(())
    })
}

struct Band<'a> {
    array: &'a Array,
    /// First unit.
    start: u64,
    to: &'a mut [u8],
}

/// What holds for all bands of one execution of a plan.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) plan: &'a Plan<'a>,
    pub(crate) checks: &'a Checks,
    pub(crate) stores: Stores,
    pub(crate) control: &'a Control,
}

/// Fills a byte range of an array that may begin and end inside an element.
pub(crate) fn fill_bytes(run: Run<'_>, array: &Array, start: u64, to: &mut [u8]) -> Result<()> {
    let unit = array.unit_bytes();
    let edge = |at: u64, to: &mut [u8]| -> Result<()> {
        let mut element = vec![0; unit as usize];
        let run = Run {
            stores: Stores::Plain,
            ..run
        };
        fill_units(run, array, at / unit, &mut element)?;
        let from = (at % unit) as usize;
        to.copy_from_slice(&element[from..from + to.len()]);
        Ok(())
    };
    let head = ((unit - start % unit) % unit).min(to.len() as u64) as usize;
    let (to_head, rest) = to.split_at_mut(head);
    if head > 0 {
        edge(start, to_head)?;
    }
    let tail = rest.len() % unit as usize;
    let (middle, to_tail) = rest.split_at_mut(rest.len() - tail);
    let at = start + head as u64;
    if tail > 0 {
        edge(at + middle.len() as u64, to_tail)?;
    }
    if middle.is_empty() {
        return Ok(());
    }
    fill_units(run, array, at / unit, middle)
}

/// Fills whole units of an array from unit `start` on.
fn fill_units(run: Run<'_>, array: &Array, start: u64, to: &mut [u8]) -> Result<()> {
    if array.stored == array.dtype {
        return fill_stored(run, array, start, to);
    }
    let n = to.len() as u64 / array.unit_bytes();
    let mut scratch = vec![0; (n * array.stored.unit().1) as usize];
    let plain = Run {
        stores: Stores::Plain,
        ..run
    };
    fill_stored(plain, array, start, &mut scratch)?;
    cast(array.stored, &scratch, array.dtype, to);
    Ok(())
}

fn fill_stored(run: Run<'_>, array: &Array, start: u64, to: &mut [u8]) -> Result<()> {
    let unit_bytes = array.stored.unit().1;
    let end = start + to.len() as u64 / unit_bytes;
    for &(from, until) in &array.padding {
        let (from, until) = (from.max(start), until.min(end));
        if from < until {
            to[((from - start) * unit_bytes) as usize..((until - start) * unit_bytes) as usize]
                .fill(0);
        }
    }
    for piece in array.pieces_over(start, end) {
        let mut copy = BoxCopy {
            run,
            source: run.plan.source(piece),
            piece,
            unit_bytes,
            present: None,
            to,
        };
        restrict(
            &piece.dims,
            0,
            piece.dst,
            (start, end),
            &mut |dims, src, dst| copy.copy(dims, src, dst - start),
        )
        .map_err(|error| error.key(&array.name))?;
    }
    Ok(())
}

/// Emits the boxes of a strided box that lie in `start..end` of the destination, as (dims, source offset, destination).
fn restrict(
    dims: &[Dim],
    src: u64,
    dst: u64,
    range: (u64, u64),
    emit: &mut impl FnMut(&[Dim], u64, u64) -> Result<()>,
) -> Result<()> {
    let (start, end) = range;
    if dst >= start && dst + dst_span(dims) <= end {
        return emit(dims, src, dst);
    }
    if dst >= end || dst + dst_span(dims) <= start {
        return Ok(());
    }
    let (outer, inner) = dims
        .split_first()
        .expect("a single element lies inside or outside");
    let inner_span = dst_span(inner);
    // Row k covers dst + k * outer.dst .. + inner_span; rows do not overlap, so at most one row is cut at each end.
    let first = (start + 1)
        .saturating_sub(dst + inner_span)
        .div_ceil(outer.dst);
    let whole_first = start.saturating_sub(dst).div_ceil(outer.dst);
    let last = (end - dst).div_ceil(outer.dst).min(outer.len);
    let whole_last = match (end - dst).checked_sub(inner_span) {
        Some(room) => (room / outer.dst + 1).min(outer.len),
        None => 0,
    };
    let at = |row: u64| (src + row * outer.src, dst + row * outer.dst);
    if whole_first < whole_last {
        for row in first..whole_first {
            restrict(inner, at(row).0, at(row).1, range, emit)?;
        }
        let mut rows = dims.to_vec();
        rows[0].len = whole_last - whole_first;
        emit(&rows, at(whole_first).0, at(whole_first).1)?;
        for row in whole_last..last {
            restrict(inner, at(row).0, at(row).1, range, emit)?;
        }
    } else {
        for row in first..last {
            restrict(inner, at(row).0, at(row).1, range, emit)?;
        }
    }
    Ok(())
}

struct BoxCopy<'a> {
    run: Run<'a>,
    source: &'a PlanSource<'a>,
    piece: &'a Piece,
    unit_bytes: u64,
    /// What of a mapped source that is proven is in memory already.
    present: Option<Present<'a>>,
    to: &'a mut [u8],
}

impl BoxCopy<'_> {
    /// Copies a box at unit `src` of the piece to unit `dst` of the slice.
    fn copy(&mut self, dims: &[Dim], src: u64, dst: u64) -> Result<()> {
        if let PlanSource::File(_, file) = self.source
            && let Some(sums) = self.run.checks.sums(self.piece.source, file)
        {
            // Where the rows lie so far apart that whole chunks are left out, each part brings in its own.
            let is_dense = dims
                .iter()
                .all(|dim| dim.len == 1 || dim.src * self.unit_bytes < CHUNK_BYTES as u64);
            if is_dense && file.source().is_mapped() {
                self.present = Checks::bring_in(file, sums, self.source_range(dims, src))?;
            }
            return self.proven_parts(file, sums, dims, src, dst);
        }
        self.dense_parts(dims, src, dst, false)
    }

    /// First byte in the source and bytes from there to the last, of a box that begins at unit `src` of the piece.
    fn source_range(&self, dims: &[Dim], src: u64) -> (u64, u64) {
        (
            self.piece.src_start_bytes + src * self.unit_bytes,
            src_span(dims) * self.unit_bytes,
        )
    }

    /// Copies a box out of chunks that are proven first, in parts no larger than a chunk, which then lies in the cache.
    fn proven_parts(
        &mut self,
        file: &ShardFile,
        sums: &Sums,
        dims: &[Dim],
        src: u64,
        dst: u64,
    ) -> Result<()> {
        let unit = self.unit_bytes;
        let (start, span) = self.source_range(dims, src);
        let widest = dims
            .iter()
            .enumerate()
            .filter(|(_, dim)| dim.len > 1)
            .max_by_key(|(_, dim)| dim.src);
        // Each positioned read is a call: there more than a chunk is taken at once, unless the gaps would be read too.
        let part = match widest {
            Some((_, dim)) if !file.source().is_mapped() && dim.src * unit < CHUNK_BYTES as u64 => {
                SCRATCH_BYTES
            }
            _ => CHUNK_BYTES as u64,
        };
        // Into fresh pages a long run is copied at once, after all its chunks are proven: the system's memcpy goes past the
        // cache for lengths like that, which gains more than is lost by fetching the source again, from the last cache.
        let is_long_run =
            self.run.stores == Stores::Fresh && is_one_run(dims) && file.source().is_mapped();
        let is_one_part = is_long_run || start / part == (start + span - 1) / part;
        if let (false, Some((widest, dim))) = (is_one_part, widest) {
            if !file.source().is_mapped() && is_one_run(dims) {
                return self.proven_run(file, sums, start, (dst * unit) as usize, span);
            }
            let mut inner = dims.to_vec();
            inner.remove(widest);
            let (stride, row_span) = (dim.src * unit, src_span(&inner) * unit);
            let mut k = 0;
            while k < dim.len {
                let row = start + k * stride;
                // As many rows as end where this part does; one at least, which is then cut itself.
                let room = (row / part + 1) * part - row;
                let n = if row_span > room {
                    1
                } else {
                    ((room - row_span) / stride + 1).min(dim.len - k)
                };
                let (at, to) = (src + k * dim.src, dst + k * dim.dst);
                if n == 1 {
                    self.proven_parts(file, sums, &inner, at, to)?;
                } else {
                    let mut rows = dims.to_vec();
                    rows[widest].len = n;
                    self.proven_part(file, sums, &rows, at, to)?;
                }
                k += n;
            }
            return Ok(());
        }
        self.proven_part(file, sums, dims, src, dst)
    }

    /// A box that lies in one part.
    fn proven_part(
        &mut self,
        file: &ShardFile,
        sums: &Sums,
        dims: &[Dim],
        src: u64,
        dst: u64,
    ) -> Result<()> {
        let range = self.source_range(dims, src);
        let (start, span) = range;
        let to = &mut self.to[(dst * self.unit_bytes) as usize..];
        let Run {
            checks,
            stores,
            control,
            ..
        } = self.run;
        if is_one_run(dims) {
            let to = (&mut to[..span as usize], stores);
            if checks.copy_run(
                self.piece.source,
                (file, self.present),
                sums,
                start,
                to,
                control,
            )? {
                return Ok(());
            }
        }
        let mapped = (file, self.present);
        if let Some(from) = checks.mapped(self.piece.source, mapped, sums, range, control)? {
            copy_box(from, to, dims, self.unit_bytes, stores);
            return Ok(());
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let at = read_chunks(file, sums, range, scratch, control)?;
            copy_box(&scratch[at..], to, dims, self.unit_bytes, stores);
            Ok(())
        })
    }

    /// One long run, read: whole chunks to where they belong, and the two ends by way of scratch memory.
    fn proven_run(
        &mut self,
        file: &ShardFile,
        sums: &Sums,
        start: u64,
        at: usize,
        n_bytes: u64,
    ) -> Result<()> {
        let chunk = CHUNK_BYTES as u64;
        let end = start + n_bytes;
        let first = start.next_multiple_of(chunk).min(end);
        // The last chunk of the file is shorter, and whole all the same.
        let last = if end == sums.n_bytes() {
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
            prove(file, sums, (first / chunk) as usize, middle)?;
        }
        for (from, to) in [(start, head), (last, tail)] {
            if !to.is_empty() {
                SCRATCH.with_borrow_mut(|scratch| {
                    let range = (from, to.len() as u64);
                    let at = read_chunks(file, sums, range, scratch, control)?;
                    copy_run(to, &scratch[at..at + to.len()], stores);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Copies a box at unit `src` of the piece to unit `dst` of the slice, fetching dense parts of the source as one.
    fn dense_parts(&mut self, dims: &[Dim], src: u64, dst: u64, is_part: bool) -> Result<()> {
        let n: u64 = dims.iter().map(|dim| dim.len).product();
        let useful = n * self.unit_bytes;
        let (start, span) = self.source_range(dims, src);
        let run = source_run(dims) * self.unit_bytes;
        let gapped = span > useful + useful / 20;
        let resident = |file: &ShardFile| !is_part && file.source().is_resident(start, span);
        let split = match self.source {
            PlanSource::Memory(_) => false,
            PlanSource::File(_, file) if file.source().is_mapped() => {
                // Where nothing has to be read for it, one range is cheaper than many.
                gapped && run >= LONG_RUN_BYTES && !resident(file)
            }
            PlanSource::File(..) => {
                let direct = is_one_run(dims);
                gapped && (run >= LONG_RUN_BYTES || span / 8 > useful)
                    || !direct && span > SCRATCH_BYTES
            }
        };
        let widest = dims
            .iter()
            .enumerate()
            .filter(|(_, dim)| dim.len > 1)
            .max_by_key(|(_, dim)| dim.src);
        if let (true, Some((widest, dim))) = (split, widest)
            && run < span
        {
            let mut inner = dims.to_vec();
            inner.remove(widest);
            for k in 0..dim.len {
                self.dense_parts(&inner, src + k * dim.src, dst + k * dim.dst, true)?;
            }
            return Ok(());
        }
        let at = (dst * self.unit_bytes) as usize;
        match self.source {
            PlanSource::Memory(bytes) => {
                let from = &bytes[start as usize..(start + span) as usize];
                copy_box(
                    from,
                    &mut self.to[at..],
                    dims,
                    self.unit_bytes,
                    self.run.stores,
                );
            }
            PlanSource::File(_, file) => {
                // Gaps that were in memory already were mapped, not fetched.
                let fetched = if gapped && run >= LONG_RUN_BYTES {
                    useful
                } else {
                    span
                };
                self.run.control.fetched(fetched);
                let scattered = is_part
                    && span < SCATTERED_RUN_BYTES
                    && file.source().is_kept()
                    && is_one_run(dims);
                if scattered {
                    // One call a run, as bringing it in would be, and the copy with it.
                    file.source()
                        .read_at(start, &mut self.to[at..at + useful as usize])?;
                } else if let Some(from) = file.source().bytes(start, span)? {
                    copy_box(
                        from,
                        &mut self.to[at..],
                        dims,
                        self.unit_bytes,
                        self.run.stores,
                    );
                } else if is_one_run(dims) {
                    file.source()
                        .read_at(start, &mut self.to[at..at + useful as usize])?;
                } else {
                    let mut scratch = vec![0; span as usize];
                    file.source().read_at(start, &mut scratch)?;
                    copy_box(
                        &scratch,
                        &mut self.to[at..],
                        dims,
                        self.unit_bytes,
                        self.run.stores,
                    );
                }
            }
        }
        Ok(())
    }
}

/// Whether a box is one run on both sides, so that it can be read where it belongs.
fn is_one_run(dims: &[Dim]) -> bool {
    match dims {
        [] => true,
        [dim] => dim.dst == 1 && source_run(dims) == dim.len,
        _ => false,
    }
}

/// Units of the longest run of a box in its source.
fn source_run(dims: &[Dim]) -> u64 {
    let mut by_stride: Vec<&Dim> = dims.iter().collect();
    by_stride.sort_by_key(|dim| dim.src);
    by_stride.iter().fold(
        1,
        |run, dim| if dim.src == run { run * dim.len } else { run },
    )
}

/// Copies a strided box; both slices begin at its first element.
fn copy_box(from: &[u8], to: &mut [u8], dims: &[Dim], unit_bytes: u64, stores: Stores) {
    let (outer, run) = match dims.split_last() {
        Some((inner, outer)) if inner.src == 1 && inner.dst == 1 => (outer, inner.len),
        _ => (dims, 1),
    };
    let run_bytes = (run * unit_bytes) as usize;
    if run > 1 || outer.is_empty() {
        // Runs that lie apart are brought near in time; shorter ones share pages, of longer ones the beginning is little.
        let step = outer
            .last()
            .map_or(0, |dim| (dim.src * unit_bytes) as usize);
        let apart = step > run_bytes && (256..=PREFETCH_BYTES).contains(&run_bytes);
        let ahead = if apart {
            PREFETCH_BYTES / run_bytes * step
        } else {
            0
        };
        for_each_row(outer, unit_bytes, &mut |src, dst| {
            let later = src + ahead;
            if ahead > 0
                && let Some(later) = from.get(later..later + run_bytes)
            {
                prefetch(later);
            }
            copy_run(
                &mut to[dst..dst + run_bytes],
                &from[src..src + run_bytes],
                stores,
            );
        });
        return;
    }
    match unit_bytes {
        1 => copy_elements::<1>(from, to, outer),
        2 => copy_elements::<2>(from, to, outer),
        3 => copy_elements::<3>(from, to, outer),
        4 => copy_elements::<4>(from, to, outer),
        8 => copy_elements::<8>(from, to, outer),
        16 => copy_elements::<16>(from, to, outer),
        _ => for_each_row(outer, unit_bytes, &mut |src, dst| {
            to[dst..dst + run_bytes].copy_from_slice(&from[src..src + run_bytes]);
        }),
    }
}

/// Calls `row` with the byte offsets of every element of a box.
fn for_each_row(dims: &[Dim], unit_bytes: u64, row: &mut impl FnMut(usize, usize)) {
    for_each_row_from(dims, unit_bytes, (0, 0), row);
}

fn for_each_row_from(
    dims: &[Dim],
    unit_bytes: u64,
    (src, dst): (u64, u64),
    row: &mut impl FnMut(usize, usize),
) {
    let Some((dim, inner)) = dims.split_first() else {
        return row(src as usize, dst as usize);
    };
    let (src_step, dst_step) = (dim.src * unit_bytes, dim.dst * unit_bytes);
    if inner.is_empty() {
        for k in 0..dim.len {
            row((src + k * src_step) as usize, (dst + k * dst_step) as usize);
        }
    } else {
        for k in 0..dim.len {
            for_each_row_from(
                inner,
                unit_bytes,
                (src + k * src_step, dst + k * dst_step),
                row,
            );
        }
    }
}

/// Element by element, for permuted boxes: in squares over the dim that is dense in the source and the one that is dense
/// in the destination, so that both sides are touched a cache line at a time.
fn copy_elements<const N: usize>(from: &[u8], to: &mut [u8], dims: &[Dim]) {
    const SQUARE: u64 = 32;
    let mut outer = dims.to_vec();
    let row = outer.pop().expect("at least one dim");
    let column = outer
        .iter()
        .enumerate()
        .min_by_key(|(_, dim)| dim.src)
        .map(|(i, _)| i);
    let column = column.map_or(
        Dim {
            len: 1,
            src: 0,
            dst: 0,
        },
        |i| outer.remove(i),
    );
    let n = N as u64;
    for_each_row(&outer, n, &mut |src, dst| {
        for i0 in (0..column.len).step_by(SQUARE as usize) {
            for j0 in (0..row.len).step_by(SQUARE as usize) {
                for i in i0..(i0 + SQUARE).min(column.len) {
                    for j in j0..(j0 + SQUARE).min(row.len) {
                        let s = src + ((i * column.src + j * row.src) * n) as usize;
                        let d = dst + ((i * column.dst + j * row.dst) * n) as usize;
                        let element: [u8; N] = from[s..s + N].try_into().expect("N bytes");
                        to[d..d + N].copy_from_slice(&element);
                    }
                }
            }
        }
    });
}

/// Whether tensors of a dtype can be cast to another.
pub fn can_cast(from: Dtype, to: Dtype) -> bool {
    const FLOATS: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::Bf16];
    from == to || FLOATS.contains(&from) && FLOATS.contains(&to)
}

/// Casts elements, rounding to nearest even; every dtype pair is one that [`can_cast`] allows.
fn cast(from: Dtype, stored: &[u8], to: Dtype, out: &mut [u8]) {
    match (from, to) {
        (Dtype::F64, Dtype::F32) => convert(stored, out, |x: [u8; 8]| {
            (f64::from_le_bytes(x) as f32).to_le_bytes()
        }),
        (Dtype::F64, Dtype::F16) => convert(stored, out, |x: [u8; 8]| {
            f16::from_f32(round_to_odd(f64::from_le_bytes(x))).to_le_bytes()
        }),
        (Dtype::F64, Dtype::Bf16) => convert(stored, out, |x: [u8; 8]| {
            bf16::from_f32(round_to_odd(f64::from_le_bytes(x))).to_le_bytes()
        }),
        (Dtype::F32, Dtype::F64) => convert(stored, out, |x: [u8; 4]| {
            f64::from(f32::from_le_bytes(x)).to_le_bytes()
        }),
        (Dtype::F32, Dtype::F16) => convert(stored, out, |x: [u8; 4]| {
            f16::from_f32(f32::from_le_bytes(x)).to_le_bytes()
        }),
        (Dtype::F32, Dtype::Bf16) => convert(stored, out, |x: [u8; 4]| {
            bf16::from_f32(f32::from_le_bytes(x)).to_le_bytes()
        }),
        (Dtype::F16, Dtype::F64) => convert(stored, out, |x: [u8; 2]| {
            f16::from_le_bytes(x).to_f64().to_le_bytes()
        }),
        (Dtype::F16, Dtype::F32) => convert(stored, out, |x: [u8; 2]| {
            f16::from_le_bytes(x).to_f32().to_le_bytes()
        }),
        (Dtype::F16, Dtype::Bf16) => {
            convert(stored, out, |x: [u8; 2]| {
                bf16::from_f32(f16::from_le_bytes(x).to_f32()).to_le_bytes()
            });
        }
        (Dtype::Bf16, Dtype::F64) => convert(stored, out, |x: [u8; 2]| {
            bf16::from_le_bytes(x).to_f64().to_le_bytes()
        }),
        (Dtype::Bf16, Dtype::F32) => convert(stored, out, |x: [u8; 2]| {
            bf16::from_le_bytes(x).to_f32().to_le_bytes()
        }),
        (Dtype::Bf16, Dtype::F16) => {
            convert(stored, out, |x: [u8; 2]| {
                f16::from_f32(bf16::from_le_bytes(x).to_f32()).to_le_bytes()
            });
        }
        _ => unreachable!("plans refuse other casts"),
    }
}

/// The f32 next to a value towards zero with its last bit set, where the value is no f32.
///
/// Rounded from there to fewer bits, the result is as if rounded once: the odd bit keeps the value off the ties (Boldo and
/// Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
fn round_to_odd(value: f64) -> f32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the rounding is corrected below"
    )]
    let nearest = value as f32;
    if value.is_nan() || f64::from(nearest).to_bits() == value.to_bits() {
        return nearest;
    }
    let away = f64::from(nearest).abs() > value.abs();
    f32::from_bits((nearest.to_bits() - u32::from(away)) | 1)
}

fn convert<const N: usize, const M: usize>(
    stored: &[u8],
    out: &mut [u8],
    one: impl Fn([u8; N]) -> [u8; M],
) {
    let (from, _) = stored.as_chunks::<N>();
    let (to, _) = out.as_chunks_mut::<M>();
    for (to, from) in to.iter_mut().zip(from) {
        *to = one(*from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restricted_boxes_cover_each_range_once() {
        let dims = [
            Dim {
                len: 3,
                src: 50,
                dst: 20,
            },
            Dim {
                len: 2,
                src: 7,
                dst: 6,
            },
            Dim {
                len: 4,
                src: 1,
                dst: 1,
            },
        ];
        let elements = |dims: &[Dim], src: u64, dst: u64| {
            let mut all = Vec::new();
            for_each_row(dims, 1, &mut |s, d| {
                all.push((dst + d as u64, src + s as u64));
            });
            all
        };
        let whole = elements(&dims, 3, 5);
        for start in 0..60 {
            for end in start + 1..62 {
                let mut found = Vec::new();
                restrict(&dims, 3, 5, (start, end), &mut |dims, src, dst| {
                    found.extend(elements(dims, src, dst));
                    Ok(())
                })
                .unwrap();
                let expected: Vec<_> = whole
                    .iter()
                    .copied()
                    .filter(|(d, _)| (start..end).contains(d))
                    .collect();
                assert_eq!(found, expected, "{start}..{end}");
            }
        }
    }

    #[test]
    fn half_precision_rounds_to_even() {
        // Exactly between two bfloat16: the one with the even last bit is taken.
        for (wide, narrow) in [(0x3F80_8000_u32, 0x3F80_u16), (0x3F81_8000, 0x3F82)] {
            let mut out = [0; 2];
            cast(Dtype::F32, &wide.to_le_bytes(), Dtype::Bf16, &mut out);
            assert_eq!(u16::from_le_bytes(out), narrow);
        }
    }
}
