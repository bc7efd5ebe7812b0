//! Requests the pages of mapped files before they are copied.
//!
//! A page fault reads one range at a time, and up to 4 MiB behind it. For slices that is nearly twice the pages that are
//! needed, and the disk has nothing to do while they are copied. So each worker requests exactly the pages of a band that is
//! copied some bands later. Requests return at once, and the disk processes many of them concurrently. Pages that are in the
//! page cache are not requested.
//!
//! Requested pages are cached one by one, and not in large folios, which are faster to map. So files that are read
//! completely are left to the readahead of the system.
//!
//! The ranks of a host often load different columns of the same rows at the same time. Then all pages are needed, but
//! each rank alone would request single pages, and a disk takes about as long for one page as for the complete row. So
//! when a band is copied, the pages between its rows are counted. If others have read at least half of them, the
//! following bands are requested with these gaps.

use crate::bytes::strided::{CopyDims, Dim, is_one_run, restrict, src_span, widest, without};
use crate::check::verify::Checks;
use crate::error::Result;
use crate::files::checksum::CHUNK_BYTES;
use crate::files::source::n_pages;
use crate::planning::plan::{Array, CopyOp, Plan, PlanSource};
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Smaller gaps between runs are read: on a disk with 60,000 requests and 1 GB a second, that takes as long as
/// another request.
pub(crate) const MIN_GAP_BYTES: u64 = 8 << 10;
/// The most that a positioned read fetches into scratch memory at once.
pub(crate) const SCRATCH_BYTES: u64 = 1 << 20;
/// Smaller gaps are read if other processes read them.
const MIN_SHARED_GAP_BYTES: u64 = CHUNK_BYTES as u64;
/// How many bands the requests are ahead of the copies.
const N_AHEAD: usize = 8;
/// Ranges of a source that are requested for one band. The pages of more are left to the readahead of the system.
const MAX_RANGES: usize = 1 << 16;
/// A file is left to the readahead of the system if the copies read more than this many tenths of it.
const COMPLETE_TENTHS: u64 = 9;

/// A part of an array: first unit, and one past the last.
pub(crate) type Piece<'a> = (&'a Array, u64, u64);

/// A part of a source that was requested without the gaps in it.
struct Spread {
    source: u32,
    start: u64,
    end: u64,
    n_requested_pages: u64,
}

/// The requests of one execution of a plan.
pub(crate) struct Readahead<'a> {
    plan: &'a Plan<'a>,
    checks: &'a Checks,
    /// Whether the pages of a source are requested, by source.
    is_requested: Vec<bool>,
    /// The pieces of each band.
    bands: Vec<Vec<Piece<'a>>>,
    /// What was requested of each band with gaps that others could read.
    spreads: Vec<OnceLock<Vec<Spread>>>,
    /// Whether other processes read the gaps.
    is_shared: AtomicBool,
}

impl<'a> Readahead<'a> {
    /// Requests the pages of the first bands. They are copied in their order.
    pub(crate) fn new(plan: &'a Plan<'a>, checks: &'a Checks, bands: Vec<Vec<Piece<'a>>>) -> Self {
        Self::of(plan, checks, bands, requested_sources(plan))
    }

    /// As [`Self::new`], also of files that the plan reads completely, but not in these bands.
    pub(crate) fn of_all(
        plan: &'a Plan<'a>,
        checks: &'a Checks,
        bands: Vec<Vec<Piece<'a>>>,
    ) -> Self {
        Self::of(
            plan,
            checks,
            bands,
            plan.sources.iter().map(is_map).collect(),
        )
    }

    fn of(
        plan: &'a Plan<'a>,
        checks: &'a Checks,
        bands: Vec<Vec<Piece<'a>>>,
        is_requested: Vec<bool>,
    ) -> Self {
        let readahead = Self {
            plan,
            checks,
            is_requested,
            spreads: bands.iter().map(|_| OnceLock::new()).collect(),
            is_shared: AtomicBool::new(false),
            bands,
        };
        for band in 0..N_AHEAD.min(readahead.bands.len()) {
            readahead.request(band);
        }
        readahead
    }

    /// Requests the pages of a band some bands behind `band`, which is copied next.
    pub(crate) fn advance(&self, band: usize) {
        if band + N_AHEAD < self.bands.len() {
            if !self.is_shared.load(Ordering::Relaxed) && self.others_read_gaps_of(band) {
                self.is_shared.store(true, Ordering::Relaxed);
            }
            self.request(band + N_AHEAD);
        }
    }

    /// Whether at least half of the pages in the gaps of a band were read, though this process did not request them.
    fn others_read_gaps_of(&self, band: usize) -> bool {
        let (mut n_gap_pages, mut n_of_others) = (0, 0);
        for spread in self.spreads[band].get().into_iter().flatten() {
            let PlanSource::File(_, file) = &self.plan.sources[spread.source as usize] else {
                continue;
            };
            let found = file
                .source()
                .n_resident_pages(spread.start, spread.end - spread.start);
            let Some(n_resident) = found else {
                continue; // unknown
            };
            n_gap_pages +=
                n_pages(spread.start, spread.end).saturating_sub(spread.n_requested_pages);
            n_of_others += n_resident.saturating_sub(spread.n_requested_pages);
        }
        n_of_others > 0 && n_of_others >= n_gap_pages / 2
    }

    fn request(&self, band: usize) {
        // First byte and end of each range, by source.
        let mut ranges: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
        for (array, start, end) in &self.bands[band] {
            let unit_bytes = array.stored.unit().1;
            for copy_op in array.copy_ops_over(*start, *end) {
                if !self.is_requested[copy_op.source as usize] {
                    continue;
                }
                let ranges = ranges.entry(copy_op.source).or_default();
                let mut add = |dims: &[Dim], src, _| -> Result<()> {
                    self.add_ranges(copy_op, unit_bytes, dims, src, ranges);
                    Ok(())
                };
                let all = (*start, *end);
                let _ = restrict(&copy_op.dims, 0, copy_op.dst, all, &mut add);
            }
        }
        let mut spreads: Vec<Spread> = Vec::new();
        for (source, mut ranges) in ranges {
            let PlanSource::File(_, file) = &self.plan.sources[source as usize] else {
                continue;
            };
            ranges.sort_unstable();
            let mut ranges = ranges.into_iter().peekable();
            while let Some((start, mut end)) = ranges.next() {
                while let Some((_, until)) = ranges.next_if(|next| next.0 < end + MIN_GAP_BYTES) {
                    end = end.max(until);
                }
                if file.source().is_resident(start, end - start) {
                    continue;
                }
                file.source().will_need(start, end - start);
                let n_requested_pages = n_pages(start, end);
                match spreads.last_mut() {
                    Some(last)
                        if last.source == source && start < last.end + MIN_SHARED_GAP_BYTES =>
                    {
                        last.end = end;
                        last.n_requested_pages += n_requested_pages;
                    }
                    _ => spreads.push(Spread {
                        source,
                        start,
                        end,
                        n_requested_pages,
                    }),
                }
            }
        }
        let _ = self.spreads[band].set(spreads);
    }

    /// Adds the ranges of a box that begins at unit `src` of a copy. Gaps that are not read are left out.
    fn add_ranges(
        &self,
        copy_op: &CopyOp,
        unit_bytes: u64,
        dims: &[Dim],
        src: u64,
        ranges: &mut Vec<(u64, u64)>,
    ) {
        let PlanSource::File(_, file) = self.plan.source(copy_op) else {
            return;
        };
        let (mut start, mut span) = (
            copy_op.src_start_bytes + src * unit_bytes,
            src_span(dims) * unit_bytes,
        );
        let checksums = self.checks.checksums(copy_op.source, file);
        let min_gap = if checksums.is_some() {
            CHUNK_BYTES as u64
        } else if self.is_shared.load(Ordering::Relaxed) {
            MIN_SHARED_GAP_BYTES
        } else {
            MIN_GAP_BYTES
        };
        if ranges.len() >= MAX_RANGES {
            return;
        }
        if let Some((widest, inner)) = skips_gaps(dims, unit_bytes, min_gap)
            && !file.source().is_resident(start, span)
        {
            for k in 0..dims[widest].len {
                self.add_ranges(
                    copy_op,
                    unit_bytes,
                    &inner,
                    src + k * dims[widest].src,
                    ranges,
                );
            }
            return;
        }
        if let Some(checksums) = checksums {
            (start, span) = checksums.span_of_chunks(start, span);
        }
        ranges.push((start, start + span));
    }
}

fn is_map(source: &PlanSource<'_>) -> bool {
    matches!(source, PlanSource::File(_, file) if file.source().is_file_map())
}

/// For each source of a plan, whether it is a mapped file of which only parts are copied.
fn requested_sources(plan: &Plan<'_>) -> Vec<bool> {
    let mut copied_bytes = vec![0; plan.sources.len()];
    for array in plan.arrays() {
        for copy_op in &array.copy_ops {
            let n_units: u64 = copy_op.dims.iter().map(|dim| dim.len).product();
            copied_bytes[copy_op.source as usize] += n_units * array.stored.unit().1;
        }
    }
    let sources = plan.sources.iter().zip(copied_bytes);
    sources
        .map(|(source, n_bytes)| match source {
            PlanSource::Memory(_) => false,
            PlanSource::File(_, file) => {
                let source = file.source();
                source.is_file_map() && n_bytes / COMPLETE_TENTHS <= source.n_bytes() / 10
            }
        })
        .collect()
}

/// The number of the dim between whose rows are gaps of at least `min_gap` bytes, and the dims of a row; `None` if
/// there are none.
pub(crate) fn skips_gaps(dims: &[Dim], unit_bytes: u64, min_gap: u64) -> Option<(usize, CopyDims)> {
    if is_one_run(dims) {
        return None;
    }
    let (at, dim) = widest(dims)?;
    let inner = without(dims, at);
    (dim.src.saturating_sub(src_span(&inner)) * unit_bytes >= min_gap).then_some((at, inner))
}
