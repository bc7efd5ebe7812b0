//! The CRC-32 of the arrays of a file, which lie behind them.
//!
//! A process that writes all of a file waits for the pieces before a sum. Processes that write parts of a file leave the
//! places of the sums out, and record the CRC-32 of what they wrote of each array; [`write_sums`] joins these at the end.
//! What was sent into an upload is not changed: there, a process leaves out the parts with sums that it does not know, and
//! [`with_sums`] is the container in which these are sent.

use super::PIECE_BYTES;
use super::content::{Container, PartSum, Sum};
use crate::error::{Error, Kind, Result};
use crate::files::checksum::{CHUNK_BYTES, crc32c};
use crate::planning::plan::Plan;
use crc_fast::{CrcAlgorithm, checksum_combine};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};

/// The CRC-32 of the arrays, joined from their parts in the order of the pieces.
pub(super) struct ArraySums {
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
    /// The sums of pieces from `start` on.
    pub(super) fn new(n_arrays: usize, start: u64) -> Self {
        Self {
            state: Mutex::new(SumState {
                end: start,
                early: BTreeMap::new(),
                crcs: vec![0; n_arrays],
                failed: false,
            }),
            changed: Condvar::new(),
        }
    }

    pub(super) fn add(&self, at: u64, parts: Vec<PartSum>) {
        let mut guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *guard;
        state.early.insert(at, parts);
        while let Some(parts) = state.early.remove(&state.end) {
            for part in parts {
                append(&mut state.crcs[part.array], part.crc, part.n_bytes);
            }
            state.end += PIECE_BYTES as u64;
        }
        self.changed.notify_all();
    }

    pub(super) fn fail(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.failed = true;
        self.changed.notify_all();
    }

    /// Waits for all pieces up to the one at `at`, and writes the sums in it. False if one of them failed.
    pub(super) fn fill(&self, sums: &[Sum], at: u64, piece: &mut [u8]) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self
            .changed
            .wait_while(state, |state| state.end <= at && !state.failed)
            .unwrap_or_else(PoisonError::into_inner);
        if state.end <= at {
            return false;
        }
        put_sums(sums, at, piece, |array| state.crcs[array]);
        true
    }

    /// By array, of all pieces.
    pub(super) fn into_crcs(self) -> Vec<u32> {
        let state = self.state.into_inner();
        state.unwrap_or_else(PoisonError::into_inner).crcs
    }
}

/// Appends bytes with a CRC-32 to those of another one.
fn append(crc: &mut u32, own: u32, n_bytes: u64) {
    if *crc == 0 {
        *crc = own; // as the sum says for 0, for any number of bytes
        return;
    }
    let (before, own) = (u64::from(*crc), u64::from(own));
    *crc = checksum_combine(CrcAlgorithm::Crc32IsoHdlc, before, own, n_bytes) as u32;
}

/// Puts the sums of arrays into a piece of the file that begins at `at`.
pub(super) fn put_sums(sums: &[Sum], at: u64, piece: &mut [u8], crc_of: impl Fn(usize) -> u32) {
    for sum in sums {
        // A sum can lie across the end of a piece.
        for (i, byte) in (0..).zip(crc_of(sum.array).to_le_bytes()) {
            let to = (sum.at + i).checked_sub(at).map(|to| to as usize);
            if let Some(to) = to.and_then(|to| piece.get_mut(to)) {
                *to = byte;
            }
        }
    }
}

/// The CRC-32 of the bytes of an array that a part of a file has: number of the array, bytes, CRC-32.
pub type SumOfPart = (usize, u64, u32);

/// The CRC-32 of each array, joined from parts of arrays in the order of the file.
fn joined(n_arrays: usize, parts: &[SumOfPart]) -> Result<Vec<u32>> {
    let mut crcs = vec![0; n_arrays];
    for &(array, n_bytes, crc) in parts {
        let known = crcs.get_mut(array).ok_or_else(|| {
            let message = "the parts are not those of a file with these sums";
            Error::new(Kind::Argument, message)
        })?;
        append(known, crc, n_bytes);
    }
    Ok(crcs)
}

/// A container in which the sums of its arrays are bytes as all others.
///
/// # Errors
/// The container does not hold the arrays of the plan, or the parts are not all bytes of these.
pub(super) fn with_sums(
    container: &Container,
    plan: &Plan<'_>,
    parts: &[SumOfPart],
) -> Result<Container> {
    container.check(plan)?;
    let crcs = joined(container.starts.len(), parts)?;
    let n_bytes: u64 = parts.iter().map(|(_, n_bytes, _)| n_bytes).sum();
    if n_bytes != plan.n_bytes() {
        let message = format!(
            "there are sums of {n_bytes} bytes, expected {}",
            plan.n_bytes()
        );
        return Err(Error::new(Kind::Argument, message));
    }
    let mut literals = container.literals.clone();
    let (mut next, mut before) = (0, 0);
    for sum in &container.sums {
        while container.starts.get(next).is_some_and(|at| *at <= sum.at) {
            before += plan.arrays()[next].n_bytes();
            next += 1;
        }
        let at = (sum.at - before) as usize;
        literals[at..at + 4].copy_from_slice(&crcs[sum.array].to_le_bytes());
    }
    Ok(Container {
        literals,
        starts: container.starts.clone(),
        sums: Vec::new(),
    })
}

/// Writes the sums into a file of which all parts are written, each without them.
///
/// # Arguments
/// `parts` are what [`super::WrittenPart::sums`] says, in the order of the file, and `chunks` the checksums of the chunks of
/// the parts. These become those of the file with the sums.
///
/// # Errors
/// The file cannot be written, or the parts are not those of a file in this container.
pub fn write_sums(
    path: &Path,
    container: &Container,
    parts: &[SumOfPart],
    chunks: &mut [u32],
    is_durable: bool,
) -> Result<()> {
    let wrong = || {
        let message = "the parts are not those of a file with these sums";
        Error::new(Kind::Argument, message).path(path)
    };
    let crcs = joined(container.starts.len(), parts).map_err(|error| error.path(path))?;
    let failed = |error: std::io::Error| Error::io("cannot write", path, &error);
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.map_err(|errno| failed(errno.into()))?);
    let n_bytes = file.metadata().map_err(failed)?.len();
    let sums = &container.sums;
    let fits = |sum: &Sum| sum.array < crcs.len() && sum.at.saturating_add(4) <= n_bytes;
    if !sums.iter().all(fits) || !sums.is_sorted_by_key(|sum| sum.at) {
        return Err(wrong());
    }
    let chunk_bytes = CHUNK_BYTES as u64;
    let of_sum = |sum: &Sum| [sum.at / chunk_bytes, (sum.at + 3) / chunk_bytes];
    let mut numbers: Vec<u64> = sums.iter().flat_map(of_sum).collect();
    numbers.dedup();
    let mut chunk = Vec::new();
    for number in numbers {
        let at = number * chunk_bytes;
        let end = n_bytes.min(at + chunk_bytes);
        let first = sums.partition_point(|sum| sum.at + 4 <= at);
        let last = sums.partition_point(|sum| sum.at < end);
        // The checksum is that of zeros there. It is linear but for a constant, which both of these have.
        chunk.clear();
        chunk.resize((end - at) as usize, 0);
        let mut change = crc32c(0, &chunk);
        put_sums(&sums[first..last], at, &mut chunk, |array| crcs[array]);
        change ^= crc32c(0, &chunk);
        *chunks.get_mut(number as usize).ok_or_else(wrong)? ^= change;
    }
    for sum in sums {
        let bytes = crcs[sum.array].to_le_bytes();
        file.write_all_at(&bytes, sum.at).map_err(failed)?;
    }
    if is_durable {
        file.sync_all().map_err(failed)?;
    }
    Ok(())
}
