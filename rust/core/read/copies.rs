//! Arrays that are compared: those of two plans, and stored ones that are read as copies of each other.

use crate::bytes::memory::Stores;
use crate::bytes::team::Team;
use crate::control::Control;
use crate::error::{Error, Kind, Result};
use crate::geometry::dtype::Dtype;
use crate::planning::index::{Held, Index};
use crate::planning::plan::Plan;
use crate::read::copy::fill;
use std::mem::take;
use std::ops::Range;

/// Bytes that are read at once; of each part at least a few elements.
const BATCH_BYTES: u64 = 4 << 20;
/// Parts that are read at once.
const BATCH_PARTS: usize = 1 << 14;

/// Parts of stored arrays that have to hold the same bytes.
#[derive(Debug, Clone)]
pub struct Copies {
    /// Their element type.
    pub dtype: Dtype,
    /// The parts, all of one shape.
    pub parts: Vec<Held>,
}

impl Copies {
    /// Elements of each part.
    fn n_elements(&self) -> u64 {
        let shape = self.parts.first().map(|one| one.shape.iter());
        shape.map_or(0, |shape| {
            shape.fold(1, |n, extent| n.saturating_mul(*extent))
        })
    }

    /// Bytes of all parts.
    fn n_bytes(&self) -> u64 {
        let (per_unit, unit_bytes) = self.dtype.unit();
        let n_units = self.n_elements().div_ceil(per_unit);
        n_units
            .saturating_mul(unit_bytes)
            .saturating_mul(self.parts.len() as u64)
    }

    /// Ranges of the elements of which all parts together have at most the bytes of a batch, or a few elements.
    fn ranges(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let (n, (per_unit, unit_bytes)) = (self.n_elements(), self.dtype.unit());
        let n_units = BATCH_BYTES / (unit_bytes * self.parts.len().max(1) as u64);
        let step = n_units.max(1) * per_unit;
        (0..n.div_ceil(step)).map(move |i| i * step..n.min((i + 1) * step))
    }
}

/// The first group of which a part differs from the first one, and the number of this part.
///
/// # Errors
/// A file cannot be read, or does not hold a part.
pub fn first_different<K>(
    index: &Index,
    groups: impl IntoIterator<Item = Result<(K, Copies)>>,
    control: &Control,
    team: &Team<'_>,
) -> Result<Option<(K, usize)>> {
    let mut reader = Reader {
        index,
        control,
        team,
        memory: Vec::new(),
    };
    let mut batch: Vec<(K, Copies)> = Vec::new();
    let (mut n_parts, mut n_bytes) = (0, 0);
    for group in groups {
        let (key, copies) = group?;
        let size = copies.n_bytes();
        if size == 0 || copies.parts.len() < 2 {
            continue;
        }
        if n_bytes + size > BATCH_BYTES || n_parts + copies.parts.len() > BATCH_PARTS {
            if let Some(found) = reader.different(&mut batch)? {
                return Ok(Some(found));
            }
            (n_parts, n_bytes) = (0, 0);
        }
        if size > BATCH_BYTES {
            for range in copies.ranges() {
                if let Some((_, part)) = reader.compare(&[(&copies, range)])? {
                    return Ok(Some((key, part)));
                }
            }
            continue;
        }
        n_parts += copies.parts.len();
        n_bytes += size;
        batch.push((key, copies));
    }
    reader.different(&mut batch)
}

/// For each array of a plan whether it has the same bytes as that of another plan.
///
/// # Errors
/// A source cannot be read or is damaged, or the run was cancelled.
pub fn are_equal(
    a: &Plan<'_>,
    b: &Plan<'_>,
    control: &Control,
    team: &Team<'_>,
) -> Result<Vec<bool>> {
    if a.arrays().len() != b.arrays().len() {
        let message = format!("{} arrays, and {}", a.arrays().len(), b.arrays().len());
        return Err(Error::new(Kind::Argument, message));
    }
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    read(a, &mut of_a, control, team)?;
    read(b, &mut of_b, control, team)?;
    let both = arrays_in(&of_a, a).zip(arrays_in(&of_b, b));
    Ok(both.map(|(a, b)| a == b).collect())
}

/// Reads the arrays of a plan, one behind the other.
fn read(plan: &Plan<'_>, memory: &mut Vec<u8>, control: &Control, team: &Team<'_>) -> Result<()> {
    memory.resize(plan.n_bytes() as usize, 0);
    let mut rest = &mut memory[..];
    let out = plan.arrays().iter().map(|array| {
        let (to, after) = take(&mut rest).split_at_mut(array.n_bytes() as usize);
        rest = after;
        to
    });
    fill(plan, out.collect(), Stores::Plain, control, team)
}

/// The arrays that were read.
fn arrays_in<'m>(mut memory: &'m [u8], plan: &Plan<'_>) -> impl Iterator<Item = &'m [u8]> {
    plan.arrays().iter().map(move |array| {
        let of_array;
        (of_array, memory) = memory.split_at(array.n_bytes() as usize);
        of_array
    })
}

struct Reader<'a> {
    index: &'a Index,
    control: &'a Control,
    team: &'a Team<'a>,
    memory: Vec<u8>,
}

impl Reader<'_> {
    /// Compares small groups, and forgets them.
    fn different<K>(&mut self, batch: &mut Vec<(K, Copies)>) -> Result<Option<(K, usize)>> {
        let groups = batch
            .iter()
            .map(|(_, copies)| (copies, 0..copies.n_elements()));
        let found = self.compare(&groups.collect::<Vec<_>>())?;
        let found = found.map(|(group, part)| (batch.swap_remove(group).0, part));
        batch.clear();
        Ok(found)
    }

    /// The first group, and the part of it, that differs in a range.
    fn compare(&mut self, groups: &[(&Copies, Range<u64>)]) -> Result<Option<(usize, usize)>> {
        self.control.check()?;
        let parts = groups.iter().flat_map(|(copies, range)| {
            let parts = copies.parts.iter();
            parts.map(move |held| (held, copies.dtype, range.clone()))
        });
        let plan = self.index.plan_held(&parts.collect::<Vec<_>>())?;
        read(&plan, &mut self.memory, self.control, self.team)?;
        let mut arrays = arrays_in(&self.memory, &plan);
        for (group, (copies, _)) in groups.iter().enumerate() {
            let mut parts = arrays.by_ref().take(copies.parts.len());
            let first = parts.next();
            if let Some(other) = parts.position(|part| Some(part) != first) {
                return Ok(Some((group, other + 1)));
            }
        }
        Ok(None)
    }
}
