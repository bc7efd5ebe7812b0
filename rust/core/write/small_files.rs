//! Writes many small shard files into one folder.
//!
//! To create a file takes longer than to write its bytes, and each further call of the system adds to that. So a small
//! file is created under its name, written at once, and closed. No space is reserved: a full disk is an error of the
//! write, or of the close, with which network file systems send what was written.
//!
//! The caller publishes the folder as a whole: a file under its name is not complete before the call returns. A file
//! that exists is left from a call that did not end. It is replaced as [`crate::write::writer`] replaces files.
//!
//! Some hundred files have one plan, so that a chunk of a source is verified once for all of them.

use crate::bytes::memory::Stores;
use crate::check::verify::{Checks, verifies_files};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::files::checksum::{CHUNK_BYTES, Checksums, crc32c};
use crate::files::source::{close, flush_pages};
use crate::geometry::dtype::Dtype;
use crate::planning::index::Index;
use crate::planning::plan::Array;
use crate::planning::request::Requested;
use crate::read::copy::fill_bytes;
use crate::read::fetch::{Faulted, Run};
use crate::write::route::Route;
use crate::write::writer::{
    Options, Sink, TemporaryFile, Written, are_small, finder_of, header_of, not_finite_of,
    sync_folder, write_hint,
};
use rayon::prelude::*;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Arrays of one plan.
const MAX_ARRAYS: usize = 4096;
/// Files that a thread writes before it closes them, some milliseconds. If they are durable they are synced first, one
/// after the other: a journal commits most of them at once.
const N_OPEN: usize = 128;
/// Files that all threads have open at most.
const MAX_OPEN: usize = 256;

/// Writes small safetensors files, on the current pool.
///
/// Returns the record of each file, in order; `None` for one that is not small, which is not written.
///
/// Args:
///     `index`: the sources.
///     `folder`: the folder. Nothing else writes files of these names into it.
///     `files`: the name of each file, below the folder, and the request for its arrays.
///     `cast`: as in [`Index::plan`].
///     `options`: of the files; `container` and `direct` have no effect.
///     `n_threads`: threads of the pool that are used.
///
/// # Errors
/// A source cannot be read or is damaged, a file cannot be written, or the run was cancelled. Complete files may be
/// left in the folder.
pub fn write_small(
    index: &Index,
    folder: &Path,
    files: &[(&str, &Requested)],
    cast: Option<Dtype>,
    options: &Options,
    n_threads: usize,
    control: &Control,
) -> Result<Vec<Option<Written>>> {
    let opened = File::open(folder);
    let opened = opened.map_err(|error| Error::io("cannot open folder", folder, &error))?;
    let folder = Folder {
        path: folder,
        opened: &opened,
    };
    let task = Task {
        index,
        folder: &folder,
        cast,
        options,
        n_open: (MAX_OPEN / n_threads).clamp(1, N_OPEN),
        control,
    };
    let shares = files.par_chunks(files.len().div_ceil(n_threads).max(1));
    let written: Vec<Vec<_>> = shares
        .map(|share| task.write_share(share))
        .collect::<Result<_>>()?;
    if options.durable {
        let subfolders = files.iter().map(|(name, _)| Path::new(name).parent());
        for subfolder in subfolders.collect::<BTreeSet<_>>().into_iter().flatten() {
            sync_folder(&folder.path.join(subfolder))?;
        }
    }
    Ok(written.into_iter().flatten().collect())
}

struct Folder<'a> {
    path: &'a Path,
    opened: &'a File,
}

/// What the threads share.
struct Task<'a> {
    index: &'a Index,
    folder: &'a Folder<'a>,
    cast: Option<Dtype>,
    options: &'a Options,
    n_open: usize,
    control: &'a Control,
}

impl Task<'_> {
    /// Writes the files of one thread.
    fn write_share(&self, files: &[(&str, &Requested)]) -> Result<Vec<Option<Written>>> {
        let mut written = Vec::with_capacity(files.len());
        while written.len() < files.len() {
            let rest = &files[written.len()..];
            let mut n_arrays = 0;
            let n = rest.iter().take_while(|(_, requested)| {
                n_arrays += requested.len();
                n_arrays <= MAX_ARRAYS
            });
            let some = &rest[..n.count().max(1)];
            written.extend(self.write_planned(some)?);
        }
        Ok(written)
    }

    /// Writes files with one plan.
    fn write_planned(&self, files: &[(&str, &Requested)]) -> Result<Vec<Option<Written>>> {
        let requests: Vec<_> = files.iter().map(|(_, requested)| *requested).collect();
        let plan = self.index.plan_files(&requests, self.cast, true)?;
        if verifies_files(&plan) {
            // All of a source is read before: that is done once for all files, on all threads.
            return Ok(vec![None; files.len()]);
        }
        let checks = Checks::new(&plan);
        let mut arrays = plan.arrays();
        let mut written = Vec::with_capacity(files.len());
        let mut image = Image::default();
        for some in files.chunks(self.n_open) {
            let run = Run {
                plan: &plan,
                checks: &checks,
                stores: Stores::Plain,
                control: self.control,
                window: None,
                faulted: &Faulted::default(), // of a short time: the pages must still be there
            };
            let mut opened = Vec::new();
            for &(name, requested) in some {
                self.control.check()?;
                let own;
                (own, arrays) = arrays.split_at(requested.len());
                if !are_small(own, self.options) {
                    written.push(None);
                    continue;
                }
                image
                    .fill(run, own, self.options)
                    .map_err(|error| error.path(&self.folder.path.join(name)))?;
                let file = create(self.folder, name, &image.bytes, self.options)?;
                opened.extend(file.map(|file| (name, file)));
                written.push(Some(image.written()?));
            }
            if self.options.durable {
                // The space of a file is allocated when its bytes are sent to the disk. If that has begun for all, the
                // first sync commits it for all.
                for (_, file) in &opened {
                    flush_pages(file);
                }
            }
            for (name, file) in opened {
                self.folder.finish(name, file, self.options.durable)?;
            }
        }
        Ok(written)
    }
}

/// The content of a file.
#[derive(Default)]
struct Image<'a> {
    bytes: Vec<u8>,
    header_bytes: usize,
    header_checksum: u32,
    /// The arrays that the header describes, and the first byte of each.
    arrays: &'a [Array],
    starts: Vec<u64>,
}

impl<'a> Image<'a> {
    /// Makes the content of a file. The header of the last one is kept if it describes these arrays, too: files of
    /// ranks often differ in their bytes alone.
    fn fill(&mut self, run: Run<'_>, arrays: &'a [Array], options: &Options) -> Result<()> {
        let is_same =
            |(a, b): (&Array, &Array)| (a.dtype, &a.name, &a.shape) == (b.dtype, &b.name, &b.shape);
        let is_known = !self.bytes.is_empty()
            && arrays.len() == self.arrays.len()
            && arrays.iter().zip(self.arrays).all(is_same);
        if !is_known {
            (self.bytes, self.starts) = header_of(arrays, &options.metadata)?;
            self.header_bytes = self.bytes.len();
            self.header_checksum = crc32c(0, &self.bytes);
            self.arrays = arrays;
        }
        let n_bytes: u64 = arrays.iter().map(Array::n_bytes).sum();
        self.bytes.truncate(self.header_bytes);
        self.bytes.resize(self.header_bytes + n_bytes as usize, 0);
        for (array, start) in arrays.iter().zip(&self.starts) {
            let to = &mut self.bytes[*start as usize..(start + array.n_bytes()) as usize];
            fill_bytes(run, array, 0, to)?;
        }
        run.control.advance(n_bytes);
        Ok(())
    }

    /// The record of the file. All of it is in the cache of the processor.
    fn written(&self) -> Result<Written> {
        let sums = self.bytes.chunks(CHUNK_BYTES).map(|chunk| crc32c(0, chunk));
        let finder = finder_of(self.arrays, &self.starts);
        finder.look(0, &self.bytes);
        Ok(Written {
            e_tag: None,
            checksums: Checksums::new(
                self.bytes.len() as u64,
                self.header_bytes as u64,
                self.header_checksum,
                sums.collect(),
            )?,
            not_finite: not_finite_of(self.arrays, &finder),
        })
    }
}

/// Creates a file with its content. `None`: the name existed; the file was replaced, and synced if it is durable.
fn create(
    folder: &Folder<'_>,
    name: &str,
    image: &[u8],
    options: &Options,
) -> Result<Option<File>> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    // The type has 16 bits on macOS.
    let mode = Mode::from_raw_mode(options.mode as rustix::fs::RawMode);
    let file = match rustix::fs::openat(folder.opened, name, flags, mode) {
        Ok(file) => File::from(file),
        Err(Errno::EXIST) => {
            let path = folder.path.join(name);
            let file = TemporaryFile::create(&path, image.len() as u64, options)?;
            file.write_at(0, image, Route::PageCache)?;
            file.publish()?;
            return Ok(None);
        }
        Err(errno) => {
            let path = folder.path.join(name);
            return Err(Error::io("cannot create", &path, &errno.into()));
        }
    };
    let written = file.write_all_at(image, 0);
    written.map_err(|error| folder.failed(name, "cannot write", &error))?;
    Ok(Some(file))
}

impl Folder<'_> {
    /// Syncs a file if it is durable, and closes it.
    fn finish(&self, name: &str, file: File, durable: bool) -> Result<()> {
        if durable {
            // After a failed sync the state of the pages is undefined. The file is removed and never synced again.
            let synced = file.sync_all();
            synced.map_err(|error| self.failed(name, "cannot sync", &error))?;
        }
        close(file).map_err(|error| self.failed(name, "cannot write", &error))
    }

    /// The error of a file, which is removed.
    fn failed(&self, name: &str, what: &str, error: &std::io::Error) -> Error {
        // The caller gets the first error; an error of the removal is ignored.
        let _ = rustix::fs::unlinkat(self.opened, name, AtFlags::empty());
        let hint = write_hint(error.raw_os_error());
        Error::io(what, &self.path.join(name), error).hint(hint)
    }
}
