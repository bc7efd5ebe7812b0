//! A table of stored tensors that the reader of a format makes, with the CRC-32 of ranges of the file, or of its begin,
//! where it knows them.
//!
//! For formats that are read outside this crate: the reader finds out which tensors a file holds, and this module keeps
//! where they lie. A tensor can be stored with strides of its own, several can share bytes, and several can be the parts
//! of one.

use crate::control::Control;
use crate::error::{Error, Printable, Result};
use crate::files::header::Entry;
use crate::files::local_array::{LocalArray, Part};
use crate::files::source::Source;
use crate::geometry::dtype::{Dtype, n_elements};
use crate::geometry::region::{flat_range_boxes, is_row_major, row_major_strides};
use crate::geometry::tile::Tile;
use crc_fast::{CrcAlgorithm, Digest, checksum, checksum_combine};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes that a CRC is computed over at once.
const PIECE_BYTES: u64 = 4 << 20;

/// A stored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedTensor {
    /// Its name, once in a file.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its shape in elements.
    pub shape: Vec<u64>,
    /// Elements between neighbours, one a dim; empty for those of row-major order.
    pub strides: Vec<u64>,
    /// Where its first element lies, in bytes of the file.
    pub start: u64,
}

/// A tensor that is stored as several of one dim, which hold its elements in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// Its name.
    pub name: String,
    /// Its shape in elements.
    pub shape: Vec<u64>,
    /// The numbers of the stored tensors. They have one dtype, and as many elements as it has.
    pub parts: Range<usize>,
}

/// A range of a file and the CRC-32 of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrcRange {
    /// Its first byte.
    pub start: u64,
    /// How many bytes.
    pub n_bytes: u64,
    /// The CRC-32 (ISO-HDLC, as in zip archives).
    pub crc: u32,
}

/// The table.
#[derive(Debug)]
pub struct Listed {
    tensors: Vec<ListedTensor>,
    /// Numbers of the tensors, sorted by name.
    by_name: Vec<u32>,
    /// Sorted by their first byte, apart from each other; whether each one was verified.
    ranges: Vec<(CrcRange, AtomicBool)>,
    /// Sorted by their first part.
    splits: Vec<Split>,
    /// Numbers of the splits, sorted by name.
    splits_by_name: Vec<u32>,
    texts: Vec<String>,
    /// The CRC-32 of the first bytes of the file, and whether they were verified.
    crc: Option<(FileCrc, Mutex<bool>)>,
}

/// The CRC-32 of the first bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileCrc {
    /// How many bytes.
    pub n_bytes: u64,
    /// The CRC-32 (ISO-HDLC, as in zip archives).
    pub crc: u32,
}

impl Listed {
    /// A table.
    ///
    /// # Errors
    /// A name occurs twice, a tensor or a range reaches beyond the file, or two ranges overlap.
    pub fn new(
        mut tensors: Vec<ListedTensor>,
        mut ranges: Vec<CrcRange>,
        file_bytes: u64,
    ) -> Result<Self> {
        for tensor in &mut tensors {
            if is_row_major(&tensor.shape, &tensor.strides) {
                tensor.strides = Vec::new();
            }
            if tensor.end().is_none_or(|end| end > file_bytes) {
                let message = format!(
                    "`{}` reaches beyond the end of the file",
                    Printable(&tensor.name)
                );
                return Err(Error::damaged(message).key(&tensor.name));
            }
        }
        let by_name = sorted_by(tensors.len(), |i| &tensors[i].name);
        let name = |i: &u32| &tensors[*i as usize].name;
        let mut pairs = by_name.iter().zip(by_name.iter().skip(1));
        if let Some((first, _)) = pairs.find(|(a, b)| name(a) == name(b)) {
            let name = name(first);
            return Err(Error::damaged(format!("`{}` is stored twice", Printable(name))).key(name));
        }
        ranges.sort_unstable_by_key(|range| (range.start, range.n_bytes));
        let ends = ranges
            .iter()
            .map(|range| range.start.checked_add(range.n_bytes));
        let are_inside = ends
            .clone()
            .all(|end| end.is_some_and(|end| end <= file_bytes));
        let starts = ranges.iter().skip(1).map(|range| Some(range.start));
        if !are_inside || ends.zip(starts).any(|(end, start)| end > start) {
            return Err(Error::damaged(
                "the ranges of its checksums overlap, or reach beyond the end of the file",
            ));
        }
        let ranges = ranges
            .into_iter()
            .map(|range| (range, AtomicBool::new(false)))
            .collect();
        Ok(Self {
            tensors,
            by_name,
            ranges,
            splits: Vec::new(),
            splits_by_name: Vec::new(),
            texts: Vec::new(),
            crc: None,
        })
    }

    /// With tensors that are stored as several, in the order of their parts.
    #[must_use]
    pub fn with_splits(mut self, splits: Vec<Split>) -> Self {
        debug_assert!(splits.is_sorted_by(|a, b| a.parts.end <= b.parts.start));
        self.splits_by_name = sorted_by(splits.len(), |i| &splits[i].name);
        self.splits = splits;
        self
    }

    /// With the names of values that are text instead of tensors.
    #[must_use]
    pub fn with_texts(mut self, texts: Vec<String>) -> Self {
        self.texts = texts;
        self
    }

    /// With the CRC of the first bytes of the file.
    #[must_use]
    pub fn with_file_crc(mut self, crc: FileCrc) -> Self {
        self.crc = Some((crc, Mutex::new(false)));
        self
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Tensor `i`, in the order in which they were given. Its end is that of its last element.
    pub fn entry(&self, i: usize) -> Entry<'_> {
        let tensor = &self.tensors[i];
        Entry {
            name: &tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            start: tensor.start,
            end: tensor.end().unwrap_or(tensor.start),
        }
    }

    /// The number of the tensor of a name.
    pub fn find(&self, name: &str) -> Option<usize> {
        let at = self
            .by_name
            .binary_search_by(|i| self.tensors[*i as usize].name.as_str().cmp(name));
        at.ok().map(|at| self.by_name[at] as usize)
    }

    /// As [`Self::find`]; tensor `near` is tried first.
    pub(crate) fn find_near(&self, name: &str, near: usize) -> Option<usize> {
        let is_near = self
            .tensors
            .get(near)
            .is_some_and(|tensor| tensor.name == name);
        if is_near { Some(near) } else { self.find(name) }
    }

    /// dtype and shape of tensor `i`.
    pub(crate) fn kind(&self, i: usize) -> (Dtype, &[u64]) {
        let tensor = &self.tensors[i];
        (tensor.dtype, &tensor.shape)
    }

    /// The strides of a tensor, unless its elements follow each other in row-major order.
    pub fn strides(&self, i: usize) -> Option<&[u64]> {
        let strides = &self.tensors[i].strides;
        (!strides.is_empty()).then_some(strides)
    }

    /// The tensors, each joined from its parts, in the order in which they were given.
    pub fn arrays(&self) -> Vec<LocalArray> {
        let mut splits = self.splits.iter().peekable();
        let (mut arrays, mut i) = (Vec::new(), 0);
        while i < self.len() {
            if let Some(split) = splits.next_if(|split| split.parts.start == i) {
                arrays.push(self.joined(split));
                i = split.parts.end;
            } else {
                arrays.push(LocalArray::whole(&self.entry(i)));
                i += 1;
            }
        }
        arrays
    }

    /// Whether a tensor is stored as several.
    pub(crate) fn has_splits(&self) -> bool {
        !self.splits.is_empty()
    }

    /// The tensor with a name, if it is stored as several.
    pub fn split(&self, name: &str) -> Option<LocalArray> {
        let at = self
            .splits_by_name
            .binary_search_by(|i| self.splits[*i as usize].name.as_str().cmp(name));
        let number = self.splits_by_name[at.ok()?];
        Some(self.joined(&self.splits[number as usize]))
    }

    /// Joins a tensor from its parts.
    fn joined(&self, split: &Split) -> LocalArray {
        let strides = row_major_strides(&split.shape);
        let flat =
            |offset: &[u64]| -> u64 { offset.iter().zip(&strides).map(|(o, s)| o * s).sum() };
        let stored = &self.tensors[split.parts.clone()];
        let mut begin = 0;
        let parts = stored.iter().map(|stored| {
            let end = begin + stored.shape[0];
            let boxes = flat_range_boxes(&split.shape, begin, end).into_iter();
            let tiles = boxes.map(|global| Tile {
                local_offset: flat(global.offset()) - begin,
                local_strides: strides.clone(),
                global,
            });
            let part = Part {
                name: stored.name.clone(),
                shape: stored.shape.clone(),
                tiles: tiles.collect(),
            };
            begin = end;
            part
        });
        LocalArray {
            parts: parts.collect(),
            name: split.name.clone(),
            dtype: stored[0].dtype,
            shape: split.shape.clone(),
        }
    }

    /// Names of values that are text instead of tensors.
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Whether there is a CRC to compare with.
    pub fn has_crc(&self) -> bool {
        self.crc.is_some() || !self.ranges.is_empty()
    }

    /// Compares all bytes that have a CRC with it, once as long as the file is open.
    ///
    /// # Errors
    /// They differ, or cannot be read.
    pub fn verify(&self, source: &Source, control: &Control) -> Result<()> {
        self.verify_file(source, control)?;
        Self::verify_ranges(self.ranges.iter().collect(), source, control)
    }

    fn verify_file(&self, source: &Source, control: &Control) -> Result<()> {
        let Some((crc, is_verified)) = &self.crc else {
            return Ok(());
        };
        // Other threads wait for the lock instead of reading the file again.
        let mut is_verified = is_verified.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_verified {
            crc.verify(source, control)?;
            *is_verified = true;
        }
        Ok(())
    }

    /// The same for the ranges that hold some bytes, given by their positions in the file. A CRC of the file is compared
    /// whole.
    ///
    /// # Errors
    /// One differs, or cannot be read.
    pub fn verify_at(
        &self,
        source: &Source,
        positions: impl Iterator<Item = u64>,
        control: &Control,
    ) -> Result<()> {
        self.verify_file(source, control)?;
        let mut used = vec![false; self.ranges.len()];
        for position in positions {
            let after = self
                .ranges
                .partition_point(|(range, _)| range.start <= position);
            if let Some(at) = after.checked_sub(1) {
                used[at] = true;
            }
        }
        let used = self.ranges.iter().zip(used);
        let used = used.filter_map(|(range, used)| used.then_some(range));
        Self::verify_ranges(used.collect(), source, control)
    }

    fn verify_ranges(
        ranges: Vec<&(CrcRange, AtomicBool)>,
        source: &Source,
        control: &Control,
    ) -> Result<()> {
        let is_open =
            |(_, is_verified): &&(CrcRange, AtomicBool)| !is_verified.load(Ordering::Relaxed);
        let ranges: Vec<_> = ranges.into_iter().filter(is_open).collect();
        // Large ranges are computed by several threads. No lock is held meanwhile: a thread that waits for the parts of
        // its range takes other work, which may need the same lock.
        let pieces: Vec<(u64, u64)> = ranges
            .iter()
            .flat_map(|(range, _)| range.pieces())
            .collect();
        let crcs = pieces.into_par_iter().map(|(start, n_bytes)| {
            control.check()?;
            crc_of(source, start, n_bytes)
        });
        let mut crcs = crcs.collect::<Result<Vec<u64>>>()?.into_iter();
        for (range, is_verified) in ranges {
            range.compare(&mut crcs, source)?;
            is_verified.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl ListedTensor {
    /// One past its last byte; `None` if that overflows.
    fn end(&self) -> Option<u64> {
        let n = if self.strides.is_empty() {
            n_elements(&self.shape)?
        } else if self.shape.len() != self.strides.len() {
            return None;
        } else if self.shape.contains(&0) {
            0
        } else {
            let mut dims = self.shape.iter().zip(&self.strides);
            let last = dims.try_fold(0_u64, |at, (extent, stride)| {
                at.checked_add((extent - 1).checked_mul(*stride)?)
            })?;
            last.checked_add(1)?
        };
        let (per_unit, unit_bytes) = self.dtype.unit();
        let n_bytes = n.div_ceil(per_unit).checked_mul(unit_bytes)?;
        self.start.checked_add(n_bytes)
    }
}

impl CrcRange {
    /// Start and length of its parts.
    fn pieces(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (start, end) = (self.start, self.start + self.n_bytes);
        let starts = (0..self.n_bytes.div_ceil(PIECE_BYTES)).map(move |i| start + i * PIECE_BYTES);
        starts.map(move |at| (at, (end - at).min(PIECE_BYTES)))
    }

    /// Joins the CRC of its parts and compares the result.
    fn compare(&self, crcs: &mut impl Iterator<Item = u64>, source: &Source) -> Result<()> {
        let parts = self.pieces().zip(crcs);
        let parts = parts.map(|((_, n_bytes), crc)| (n_bytes, crc));
        // To join two takes longer than the CRC of a small range.
        let joined = parts.reduce(|(_, before), (n_bytes, crc)| {
            let joined = checksum_combine(CrcAlgorithm::Crc32IsoHdlc, before, crc, n_bytes);
            (n_bytes, joined)
        });
        if joined.map_or(0, |(_, crc)| crc) as u32 == self.crc {
            return Ok(());
        }
        let path = source.path();
        let message = format!(
            "{}: bytes {} to {} differ from their CRC-32",
            Printable(&path.to_string_lossy()),
            self.start,
            self.start + self.n_bytes
        );
        Err(Error::damaged(message)
            .path(path)
            .hint("the file was damaged after it was written: use another copy of it"))
    }
}

impl FileCrc {
    /// Reads the bytes and compares them with the CRC.
    fn verify(&self, source: &Source, control: &Control) -> Result<()> {
        let mut digest = Digest::new(CrcAlgorithm::Crc32IsoHdlc);
        let mut scratch = Vec::new();
        let mut at = 0;
        while at < self.n_bytes {
            control.check()?;
            let n = (self.n_bytes - at).min(PIECE_BYTES);
            if let Some(bytes) = source.bytes(at, n)? {
                digest.update(bytes);
            } else {
                scratch.resize(n as usize, 0);
                source.read_at(at, &mut scratch)?;
                digest.update(&scratch);
            }
            control.fetched(n);
            at += n;
        }
        let found = digest.finalize() as u32;
        if found == self.crc {
            return Ok(());
        }
        let message = format!(
            "{}: its bytes have the CRC {found:#010x}, but {:#010x} is stored at its end",
            Printable(&source.path().to_string_lossy()),
            self.crc
        );
        Err(Error::damaged(message).path(source.path()).hint(
            "the file was changed or damaged after it was written; use a copy of it, or an older checkpoint",
        ))
    }
}

/// The numbers 0 to `n`, sorted by name.
fn sorted_by<'a>(n: usize, name: impl Fn(usize) -> &'a str) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..n as u32).collect();
    numbers.sort_unstable_by(|a, b| name(*a as usize).cmp(name(*b as usize)));
    numbers
}

fn crc_of(source: &Source, start: u64, n_bytes: u64) -> Result<u64> {
    if let Some(bytes) = source.bytes(start, n_bytes)? {
        return Ok(checksum(CrcAlgorithm::Crc32IsoHdlc, bytes));
    }
    let mut scratch = vec![0; n_bytes as usize];
    source.read_at(start, &mut scratch)?;
    Ok(checksum(CrcAlgorithm::Crc32IsoHdlc, &scratch))
}
