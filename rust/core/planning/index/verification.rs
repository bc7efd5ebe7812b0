//! Comparison of the files of an index with its table.

use super::files::FileSlot;
use super::{CHUNK_TENSORS, Index};
use crate::error::{Error, Kind, Result};
use crate::files::shard_file::{Format, header_has, verify_header};
use crate::geometry::dtype::Dtype;
use crate::geometry::layout::Cuts;
use crate::geometry::region::{Dims, Region};
use crate::planning::stored::{Form, Holders, Stored, ZEROS, named, no_holder};
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A tensor that a file must hold: its entry in the index, and its name and shape there.
type Expected<'a> = (&'a Stored, Cow<'a, str>, Cow<'a, [u64]>);

impl Index {
    /// Checks that the stored regions of every key cover it without gaps.
    pub fn check_coverage(&self) -> Result<()> {
        self.tensors
            .par_iter()
            .try_for_each(|stored| match &stored.form {
                Form::Grid(grid) => grid.check_coverage(stored),
                Form::Tiles(tiles) => tiles.check_coverage(stored),
                Form::Flat(_) => Ok(()), // by construction
                Form::Divided(divided) if divided.covers(&stored.shape) => Ok(()),
                Form::Divided(_) => Err(no_holder(&stored.key, &Region::whole(&stored.shape))),
            })
    }

    /// Opens every file that holds a tensor and compares it with the index. Returns `(file, name)` of unlisted tensors.
    pub fn check(&self) -> Result<Vec<(u32, String)>> {
        self.check_coverage()?;
        self.check_files(|_| true)
    }

    /// Opens the files that are to be checked and hold a tensor, and compares them with the index.
    fn check_files(&self, is_checked: impl Fn(u32) -> bool) -> Result<Vec<(u32, String)>> {
        // Their entries come from their headers, so opening them is the only check.
        for whole in &self.whole_files {
            self.open(whole.file)?;
        }
        let mut expected: Vec<Vec<Expected<'_>>> =
            (0..self.files.len()).map(|_| Vec::new()).collect();
        let (mut of_lines, mut joined) = (HashSet::new(), HashSet::new());
        for stored in &self.tensors {
            if let Some(files) = stored.only_cell() {
                for &file in files.iter().filter(|&&file| is_checked(file)) {
                    let shape = Cow::Borrowed(&*stored.shape);
                    expected[file as usize].push((stored, Cow::Borrowed(&*stored.key), shape));
                }
                continue;
            }
            match &stored.form {
                Form::Grid(grid) => {
                    for cell in 0..grid.n_cells() {
                        let mut files = grid.files(cell, u64::MAX);
                        files.retain(|&file| is_checked(file));
                        if files.is_empty() {
                            continue;
                        }
                        let region = grid.region(cell);
                        let shape: Vec<u64> =
                            grid.order.iter().map(|&d| region.shape()[d]).collect();
                        for file in files {
                            let name = grid.name(cell, &stored.key);
                            let shape = Cow::Owned(shape.clone());
                            expected[file as usize].push((stored, name, shape));
                        }
                    }
                }
                Form::Tiles(tiles) => {
                    let stored_in = |file| file != ZEROS && is_checked(file);
                    for tensor in tiles.tensors.iter().filter(|one| stored_in(one.file)) {
                        let (name, shape) = (&*tensor.name, &*tensor.shape);
                        expected[tensor.file as usize].push((stored, name.into(), shape.into()));
                    }
                }
                Form::Divided(divided) => {
                    let joint = divided.joint().map(Arc::as_ptr);
                    if joint.is_none_or(|joint| joined.insert((joint, stored.dtype.get()))) {
                        let arrays = divided.arrays()?.into_iter();
                        for (file, shape) in arrays.filter(|(file, _)| is_checked(*file)) {
                            let name = divided.name(&stored.key);
                            expected[file as usize].push((stored, name.into(), shape.into()));
                        }
                    }
                }
                Form::Flat(flat) => {
                    // Of the tensors in the same arrays the first one is enough.
                    if !of_lines.insert((Arc::as_ptr(flat.lines()), stored.dtype.get())) {
                        continue;
                    }
                    let arrays = flat.lines().arrays();
                    for (file, name, shape) in arrays.filter(|(file, ..)| is_checked(*file)) {
                        expected[file as usize].push((stored, name.into(), shape.into()));
                    }
                }
            }
        }
        let unlisted: Vec<Vec<(u32, String)>> = expected
            .into_par_iter()
            .enumerate()
            .filter(|(_, expected)| !expected.is_empty())
            .map(|(file, expected)| {
                let file = file as u32;
                let opened = self.open(file)?;
                let table = opened.table();
                let is_whole = self.whole_files.iter().any(|whole| whole.file == file);
                let is_known = (0..table.len()).map(|_| AtomicBool::new(is_whole));
                let is_known: Vec<AtomicBool> = is_known.collect();
                let chunks = expected.par_chunks(CHUNK_TENSORS).enumerate();
                chunks.try_for_each(|(i, expected)| {
                    // Tensors are often listed in the order of the file.
                    let mut next = i * CHUNK_TENSORS;
                    for (stored, name, shape) in expected {
                        let at = table
                            .find_near(name, next)
                            .ok_or_else(|| self.missing_in(file, name))?;
                        is_known[at].store(true, Ordering::Relaxed);
                        next = at + 1;
                        let found = table.dtype(at);
                        let dtype = *stored.dtype.get_or_init(|| found);
                        if found != dtype || !table.has_shape(at, shape) {
                            let entry = table.entry(at);
                            let found = (entry.dtype, &entry.shape[..]);
                            self.check_stored(file, name, found, (dtype, shape))?;
                        }
                    }
                    Ok(())
                })?;
                let is_known = is_known.into_iter().map(AtomicBool::into_inner);
                let unlisted = is_known.enumerate().filter(|(_, known)| !known);
                Ok(unlisted
                    .map(|(i, _)| (file, table.entry(i).name.to_owned()))
                    .collect())
            })
            .collect::<Result<_>>()?;
        Ok(unlisted.into_iter().flatten().collect())
    }

    /// Like [`Self::check`], but a header is not parsed if the described tensors fill the file, so that it holds no
    /// others. If its checksum is known, its bytes are read and compared with it, and nothing is kept. `dtype_of` gives
    /// the described dtype of a key, or `None`.
    ///
    /// That such a file holds the described tensors is checked when it is opened.
    pub fn check_headers(
        &self,
        dtype_of: impl Fn(&str) -> Option<Dtype>,
    ) -> Result<Vec<(u32, String)>> {
        self.check_coverage()?;
        let described = self.described_bytes(dtype_of);
        let is_filled = |(slot, described): (&FileSlot, &Option<u64>)| match slot.checksums.get() {
            Some(one) if *described == Some(one.n_bytes() - one.header_bytes()) => {
                verify_header(&(slot.open)()?, one).map(|()| true)
            }
            Some(_) => Ok(false),
            // A file that cannot be read is opened again, which says why.
            None => Ok(described.is_some() && slot.data_bytes().ok().flatten() == *described),
        };
        let files = self.files.par_iter().zip(&described);
        let filled: Vec<bool> = files.map(is_filled).collect::<Result<_>>()?;
        if filled.contains(&false) {
            self.check_files(|file| !filled[file as usize])
        } else {
            Ok(Vec::new())
        }
    }

    /// The safetensors files whose headers hold a text. Nothing is parsed, and a file that cannot be read is left out.
    pub fn headers_with(&self, text: &[u8]) -> Vec<u32> {
        let has_text = |slot: &FileSlot| {
            matches!(slot.format, Format::Safetensors)
                && (slot.open)().is_ok_and(|source| header_has(&source, text).unwrap_or(false))
        };
        let found = self.files.par_iter().map(has_text).collect::<Vec<_>>();
        (0..)
            .zip(found)
            .filter_map(|(file, found)| found.then_some(file))
            .collect()
    }

    /// For each file the bytes of its described tensors; `None` if that is not known.
    fn described_bytes(&self, dtype_of: impl Fn(&str) -> Option<Dtype>) -> Vec<Option<u64>> {
        let mut described: Vec<Option<u64>> = vec![Some(0); self.files.len()];
        for whole in &self.whole_files {
            described[whole.file as usize] = None;
        }
        for stored in &self.tensors {
            let dtype = stored.dtype.get().copied();
            let dtype = dtype.or_else(|| dtype_of(&stored.key));
            let mut add = |file: u32, shape: &[u64]| {
                let n_bytes = dtype.and_then(|dtype| dtype.n_bytes(shape));
                let sum = &mut described[file as usize];
                *sum = sum.and_then(|sum| sum.checked_add(n_bytes?));
            };
            match &stored.form {
                Form::Grid(grid) => {
                    let even = grid.cuts.iter().map(|cuts| match cuts {
                        Cuts::Even { extent, n_parts } => Some(extent / n_parts),
                        _ => None,
                    });
                    if let (Holders::Table { files, .. }, Some(shape)) =
                        (&grid.holders, even.collect::<Option<Vec<_>>>())
                    {
                        files.iter().for_each(|&file| add(file, &shape));
                    } else {
                        return vec![None; self.files.len()];
                    }
                }
                Form::Tiles(tiles) => {
                    for tensor in tiles.tensors.iter().filter(|one| one.file != ZEROS) {
                        add(tensor.file, &tensor.shape);
                    }
                }
                Form::Flat(_) | Form::Divided(_) => return vec![None; self.files.len()],
            }
        }
        described
    }

    pub(super) fn check_stored(
        &self,
        file: u32,
        name: &str,
        found: (Dtype, &[u64]),
        expected: (Dtype, &[u64]),
    ) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        let message = format!(
            "{} in {}: expected {} {}, found {} {}",
            named(name),
            self.files[file as usize].path.display(),
            expected.0,
            Dims(expected.1),
            found.0,
            Dims(found.1),
        );
        Err(Error::new(Kind::Mismatch, message)
            .key(name)
            .path(&self.files[file as usize].path))
    }

    pub(super) fn missing_in(&self, file: u32, name: &str) -> Error {
        let path = &self.files[file as usize].path;
        Error::damaged(format!(
            "{} does not hold the expected tensor {}",
            path.display(),
            named(name)
        ))
        .key(name)
        .path(path)
    }
}
