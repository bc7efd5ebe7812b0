//! The content of a file: the arrays of a plan and the bytes between them.

use super::{BAND_BYTES, DIRECT_BLOCK_BYTES, Options, PIECE_BYTES};
use crate::bytes::memory::{Stores, finish_stores};
use crate::check::verify::Checks;
use crate::control::Control;
use crate::error::{Error, Kind, Result};
use crate::files::checksum::{Checksums, crc32c};
use crate::files::header;
use crate::planning::extents::{Extents, Rules};
use crate::planning::plan::{Array, Plan};
use crate::read::copy::fill_bytes;
use crate::read::fetch::{Faulted, Run};
use crate::read::readahead::{Piece, Readahead};
use crate::read::window::{Early, add_wanted, link_of, plan_extents};
use crc_fast::{CrcAlgorithm, checksum};
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::{Deref, Range};

/// In files of at least this size the data is page-aligned, for direct reads and maps.
const PAGE_ALIGNED_FROM_BYTES: u64 = 1 << 20;
/// Of the end of a range of a file, whose pages are requested one by one: 0.2 s of the processor more for a GiB.
const MAX_REQUESTED_BYTES: u64 = 32 << 20;

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
    pub(super) plan: &'a Plan<'a>,
    checks: Checks,
    pub(super) container: Cow<'a, Container>,
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

    /// The content of a file that is written with these options.
    pub(super) fn of_options(plan: &'a Plan<'a>, options: &'a Options) -> Result<Self> {
        match &options.container {
            None => Self::new(plan, &options.metadata),
            Some(container) => Self::with_container(plan, container),
        }
    }

    fn with_container(plan: &'a Plan<'a>, container: &'a Container) -> Result<Self> {
        container.check(plan)?;
        Ok(Self::of(plan, Cow::Borrowed(container), 0))
    }

    pub(super) fn of(plan: &'a Plan<'a>, container: Cow<'a, Container>, header_bytes: u64) -> Self {
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

    pub(super) fn checksums(&self, chunks: Vec<u32>) -> Result<Checksums> {
        let header_checksum = self.header_checksum();
        Checksums::new(self.n_bytes(), self.header_bytes, header_checksum, chunks)
    }

    pub(super) fn header_checksum(&self) -> u32 {
        crc32c(0, &self.container.literals[..self.header_bytes as usize])
    }

    /// The checksum of the header of a safetensors file; of another one, that of its container, to compare parts by.
    pub(super) fn identity(&self) -> u32 {
        if self.header_bytes > 0 {
            return self.header_checksum();
        }
        let Container {
            literals,
            starts,
            sums,
        } = &*self.container;
        let of_sums = sums.iter().flat_map(|sum| [sum.at, sum.array as u64]);
        let places = starts.iter().copied().chain(of_sums);
        places.fold(crc32c(0, literals), |crc, place| {
            crc32c(crc, &place.to_le_bytes())
        })
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
            self.fill_band(start + (i * BAND_BYTES) as u64, band, stores, None, control)
        })
    }

    pub(super) fn fill_band(
        &self,
        at: u64,
        to: &mut [u8],
        stores: Stores,
        window: Option<&dyn Early>,
        control: &Control,
    ) -> Result<()> {
        control.check()?;
        let run = Run {
            plan: self.plan,
            checks: &self.checks,
            stores,
            control,
            faulted: &Faulted::default(),
            window,
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

    /// The requests for remote sources, in the pieces of a range of the file.
    pub(super) fn extents(&self, range: &Range<u64>) -> (Extents, Rules) {
        let rules = Rules::of(link_of(self.plan), range.end - range.start);
        let pieces = self.pieces(range);
        let mut wanted = Vec::new();
        for (number, arrays) in pieces.iter().enumerate() {
            add_wanted(self.plan, number, &mut arrays.iter().copied(), &mut wanted);
        }
        let extents = plan_extents(self.plan, &self.checks, &wanted, pieces.len(), rules);
        (extents, rules)
    }

    /// The requests for the pages of mapped files, in the last pieces of a range of the file. The pages before them are left
    /// to the readahead of the system, which would read up to 12 MB behind the end. `None`: the range is the whole file.
    pub(super) fn readahead(&self, range: &Range<u64>) -> Option<Readahead<'_>> {
        let n_bytes = range.end - range.start;
        if n_bytes >= self.n_bytes() {
            return None;
        }
        let piece_bytes = PIECE_BYTES as u64;
        let n_before = n_bytes
            .saturating_sub(MAX_REQUESTED_BYTES)
            .div_ceil(piece_bytes);
        let mut pieces: Vec<_> = (0..n_before).map(|_| Vec::new()).collect();
        pieces.extend(self.pieces(&(range.start + n_before * piece_bytes..range.end)));
        Some(Readahead::of_all(self.plan, &self.checks, pieces))
    }

    /// What the pieces of a range of the file have of each array.
    fn pieces(&self, range: &Range<u64>) -> Vec<Vec<Piece<'_>>> {
        let piece_bytes = PIECE_BYTES as u64;
        let n_pieces = (range.end - range.start).div_ceil(piece_bytes);
        let mut pieces: Vec<Vec<Piece<'_>>> = (0..n_pieces).map(|_| Vec::new()).collect();
        for (start, array) in &self.parts.arrays {
            let (start, unit) = (*start, array.unit_bytes());
            let end = (start + array.n_bytes()).min(range.end);
            let from = start.max(range.start);
            if from >= end {
                continue;
            }
            let number = |at: u64| at - range.start;
            for piece in number(from) / piece_bytes..number(end).div_ceil(piece_bytes) {
                let at = range.start + piece * piece_bytes;
                let until = (at + piece_bytes).min(end) - start;
                let units = (
                    &**array,
                    (at.max(from) - start) / unit,
                    until.div_ceil(unit),
                );
                pieces[piece as usize].push(units);
            }
        }
        pieces
    }

    /// Where a part of the file begins that is given by a position in the bytes of its arrays.
    ///
    /// # Arguments
    /// `unit` - it begins with a multiple of as many bytes, which are complete chunks.
    pub(super) fn position(&self, array_bytes: u64, unit: u64) -> u64 {
        let literals = self.container.literals.len() as u64;
        if array_bytes == 0 {
            return 0;
        }
        if array_bytes >= self.plan.n_bytes() {
            return self.n_bytes();
        }
        (literals + array_bytes) / unit * unit
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
    pub(super) fn part_sums(&self, at: u64, piece: &[u8]) -> Vec<PartSum> {
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
                    n_bytes: to - from,
                    crc: checksum(CrcAlgorithm::Crc32IsoHdlc, bytes) as u32,
                }
            })
        });
        parts.collect()
    }

    /// For each array of which bytes lie in a range of the file, its number and how many.
    pub(super) fn arrays_in(&self, range: &Range<u64>) -> Vec<(usize, u64)> {
        let arrays = self.plan.arrays().iter().zip(&self.container.starts);
        let bytes = arrays.enumerate().map(|(number, (array, start))| {
            let (from, to) = (*start, start + array.n_bytes());
            let n = to.min(range.end).saturating_sub(from.max(range.start));
            (number, n)
        });
        bytes.filter(|(_, n_bytes)| *n_bytes > 0).collect()
    }

    /// The sums of which a byte lies in a range of the file.
    pub(super) fn sums_in(&self, start: u64, end: u64) -> &[Sum] {
        let sums = &self.container.sums;
        let first = sums.partition_point(|sum| sum.at + 4 <= start);
        let last = sums.partition_point(|sum| sum.at < end);
        &sums[first..last]
    }

    /// The units of the file, by number, with a sum of an array that begins before a range of the file.
    pub(super) fn units_without_sums(&self, range: &Range<u64>, unit: u64) -> BTreeSet<u64> {
        let sums = self.sums_in(range.start, range.end).iter().filter(|sum| {
            let n_bytes = self.plan.arrays()[sum.array].n_bytes();
            n_bytes > 0 && self.container.starts[sum.array] < range.start
        });
        // A sum can lie across the end of a unit.
        let units = sums.flat_map(|sum| [sum.at, sum.at + 3].map(|at| at / unit));
        units
            .filter(|number| range.contains(&(number * unit)))
            .collect()
    }
}

/// The CRC-32 of the part of an array that lies in one piece.
pub(super) struct PartSum {
    pub(super) array: usize,
    pub(super) n_bytes: u64,
    pub(super) crc: u32,
}
