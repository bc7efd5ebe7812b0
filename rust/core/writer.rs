//! Writing one shard file: streamed, within a memory budget, whole or not at all.
//!
//! The file is produced front to back in windows. While one window goes to disk, in 4 MiB pieces, four in flight, the
//! next is filled by the copy engine, straight from the sources of a plan. Sums of the 256 KiB chunks are taken of each
//! piece before it is written, so they speak of what was meant, not of what the disk returned. The bytes go to a
//! temporary sibling, which is synced and then renamed: under its name the file is whole.
//!
//! `O_DIRECT` is the fast way to durable bytes and leaves the page cache to others; where a file system refuses it, and
//! for the tail that is no multiple of its block, writes are buffered.

use crate::checksum::{CHUNK_BYTES, Sums, crc32c};
use crate::copy::{Control, Run, fill_bytes};
use crate::error::{Error, Kind, Result};
use crate::header;
use crate::memory::{Memory, Stores, finish_stores};
use crate::plan::Plan;
use crate::verify::{Checks, prove_files};
use rayon::prelude::*;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Alignment that every disk accepts for direct writes.
const DIRECT_BLOCK_BYTES: usize = 4096;
const PIECE_BYTES: usize = 4 << 20;
const PIECES_IN_FLIGHT: usize = 4;
/// Beyond this a larger window gains nothing.
const MAX_WINDOW_BYTES: usize = 64 << 20;
const BAND_BYTES: usize = 2 << 20;
/// Files from this size on begin their data on a page, so that it can be read and mapped aligned.
const PAGE_ALIGNED_FROM_BYTES: u64 = 1 << 20;
/// The least budget: two windows of one piece.
pub const MIN_MEMORY_BYTES: u64 = 2 * PIECE_BYTES as u64;

/// How a file is written.
#[derive(Debug, Clone)]
pub struct Options {
    /// The header's `__metadata__`.
    pub metadata: Vec<(String, String)>,
    /// Sync the file and its folder before returning.
    pub durable: bool,
    /// Try `O_DIRECT`.
    pub direct: bool,
    /// Permission bits, less the process's umask.
    pub mode: u32,
}

/// The memory through which files are written: two windows within a budget.
///
/// It is kept from file to file, because touching fresh pages costs more than filling them.
#[derive(Debug)]
pub struct Windows {
    memory: [Memory; 2],
    window_bytes: usize,
}

impl Windows {
    /// Windows within a budget; nothing is allocated before the first file.
    pub fn new(memory_bytes: u64) -> Result<Self> {
        if memory_bytes < MIN_MEMORY_BYTES {
            let message = format!(
                "a budget of {memory_bytes} bytes is too small; at least {MIN_MEMORY_BYTES} are needed"
            );
            return Err(Error::new(Kind::Argument, message));
        }
        let half = (memory_bytes / 2).min(MAX_WINDOW_BYTES as u64) as usize;
        let memory = [Memory::new(0)?, Memory::new(0)?];
        Ok(Self {
            memory,
            window_bytes: half / PIECE_BYTES * PIECE_BYTES,
        })
    }

    /// Both windows, large enough for a file of this size.
    fn for_file(&mut self, n_bytes: u64) -> Result<[&mut Memory; 2]> {
        let first = (self.window_bytes as u64).min(n_bytes) as usize;
        let second = if n_bytes > self.window_bytes as u64 {
            first
        } else {
            0
        };
        for (memory, len) in self.memory.iter_mut().zip([first, second]) {
            if memory.len() < len {
                // Large ones at once: files of growing sizes must not allocate again and again.
                *memory = Memory::new(if len > PIECE_BYTES {
                    self.window_bytes
                } else {
                    PIECE_BYTES
                })?;
            }
        }
        let [first, second] = &mut self.memory;
        Ok([first, second])
    }
}

/// Writes the arrays of a plan into one shard file, in their order and under their names.
///
/// # Errors
/// Whatever fails, the temporary is removed and a file that had the name before is untouched.
pub fn write(
    path: &Path,
    plan: &Plan<'_>,
    options: &Options,
    windows: &mut Windows,
    control: &Control,
) -> Result<Sums> {
    let content = Content::new(plan, &options.metadata).map_err(|error| error.path(path))?;
    prove_files(plan, control)?;
    let temporary = Temporary::create(path, content.n_bytes(), options)?;
    let chunks = stream(&temporary, &content, windows, control)?;
    temporary.publish(path, options.durable)?;
    content.sums(chunks)
}

/// Writes the image of a file that lies in memory, from a page on. See [`write()`].
///
/// # Errors
/// As there.
pub fn write_image(
    path: &Path,
    image: &[u8],
    header_bytes: u64,
    options: &Options,
    control: &Control,
) -> Result<Sums> {
    let n_bytes = image.len() as u64;
    let temporary = Temporary::create(path, n_bytes, options)?;
    let chunks = zeroed_sums(n_bytes);
    let pieces = Pieces {
        file: &temporary,
        window: image,
        len: image.len(),
        start: 0,
        next: AtomicU64::new(0),
        sums: &chunks,
        control: Some(control),
    };
    pieces.write_while(|| Ok(()))?;
    temporary.publish(path, options.durable)?;
    let header = &image[..header_bytes as usize];
    Sums::new(n_bytes, header_bytes, crc32c(0, header), finished(chunks))
}

fn zeroed_sums(n_bytes: u64) -> Vec<AtomicU32> {
    let n_chunks = (n_bytes as usize).div_ceil(CHUNK_BYTES);
    (0..n_chunks).map(|_| AtomicU32::new(0)).collect()
}

fn finished(sums: Vec<AtomicU32>) -> Vec<u32> {
    sums.into_iter().map(AtomicU32::into_inner).collect()
}

/// The bytes of the file to be.
pub(crate) struct Content<'a> {
    plan: &'a Plan<'a>,
    checks: Checks,
    header: Vec<u8>,
    /// First byte of each array, counted from the end of the header.
    starts: Vec<u64>,
}

impl<'a> Content<'a> {
    pub(crate) fn new(plan: &'a Plan<'a>, metadata: &[(String, String)]) -> Result<Self> {
        let align = if plan.n_bytes() >= PAGE_ALIGNED_FROM_BYTES {
            DIRECT_BLOCK_BYTES as u64
        } else {
            64
        };
        let tensors: Vec<_> = plan
            .arrays()
            .iter()
            .map(|a| (a.name.as_str(), a.dtype, a.shape.as_slice()))
            .collect();
        let (header, starts) = header::build(&tensors, metadata, align)?;
        Ok(Self {
            plan,
            checks: Checks::new(plan),
            header,
            starts,
        })
    }

    pub(crate) fn header_bytes(&self) -> u64 {
        self.header.len() as u64
    }

    pub(crate) fn n_bytes(&self) -> u64 {
        self.header_bytes() + self.plan.n_bytes()
    }

    fn sums(&self, chunks: Vec<u32>) -> Result<Sums> {
        let header_sum = crc32c(0, &self.header);
        Sums::new(self.n_bytes(), self.header_bytes(), header_sum, chunks)
    }
}

impl Content<'_> {
    /// Fills the bytes of the file from `start` on, on the current pool.
    pub(crate) fn fill(
        &self,
        start: u64,
        to: &mut [u8],
        stores: Stores,
        control: &Control,
    ) -> Result<()> {
        let run = Run {
            plan: self.plan,
            checks: &self.checks,
            stores,
            control,
        };
        let bands: Vec<_> = to.chunks_mut(BAND_BYTES).enumerate().collect();
        bands.into_par_iter().try_for_each(|(i, band)| {
            control.check()?;
            self.fill_band(run, start + (i * BAND_BYTES) as u64, band)?;
            finish_stores(stores);
            Ok(())
        })
    }

    fn fill_band(&self, run: Run<'_>, mut at: u64, mut to: &mut [u8]) -> Result<()> {
        let data_start = self.header.len() as u64;
        if at < data_start {
            let n = to.len().min((data_start - at) as usize);
            let (head, rest) = to.split_at_mut(n);
            head.copy_from_slice(&self.header[at as usize..at as usize + n]);
            (at, to) = (at + n as u64, rest);
        }
        // The last array that begins at or before this byte; empty arrays share their start with the next one.
        let mut i = self
            .starts
            .partition_point(|start| data_start + start <= at)
            .saturating_sub(1);
        while !to.is_empty() {
            let array = &self.plan.arrays()[i];
            let offset = at - data_start - self.starts[i];
            let n = to
                .len()
                .min((array.n_bytes() - offset.min(array.n_bytes())) as usize);
            if n > 0 {
                let (part, rest) = to.split_at_mut(n);
                fill_bytes(run, array, offset, part)?;
                run.control.advance(n as u64);
                (at, to) = (at + n as u64, rest);
            }
            i += 1;
        }
        Ok(())
    }
}

fn stream(
    temporary: &Temporary,
    content: &Content<'_>,
    windows: &mut Windows,
    control: &Control,
) -> Result<Vec<u32>> {
    let n_bytes = content.n_bytes();
    let window_bytes = windows.window_bytes;
    let [mut current, mut other] = windows.for_file(n_bytes)?;
    let sums = zeroed_sums(n_bytes);
    let len_at = |start: u64| (n_bytes - start).min(window_bytes as u64) as usize;
    let fill = |start: u64, memory: &mut Memory| {
        let to = &mut memory.as_mut_slice()[..len_at(start)];
        content.fill(start, to, Stores::Plain, control)
    };
    fill(0, current)?;
    let mut start = 0;
    while start < n_bytes {
        let len = len_at(start);
        let next = start + len as u64;
        let pieces = Pieces {
            file: temporary,
            window: &*current.as_mut_slice(),
            len,
            start,
            next: AtomicU64::new(0),
            sums: &sums,
            control: None,
        };
        pieces.write_while(|| {
            if next < n_bytes {
                fill(next, other)?;
            }
            Ok(())
        })?;
        (current, other) = (other, current);
        start = next;
    }
    Ok(finished(sums))
}

/// One window on its way to the file; it begins on a chunk.
struct Pieces<'a> {
    file: &'a Temporary,
    window: &'a [u8],
    len: usize,
    start: u64,
    next: AtomicU64,
    sums: &'a [AtomicU32],
    /// Told of every piece, where nobody else tells of the bytes.
    control: Option<&'a Control>,
}

impl Pieces<'_> {
    /// Writes the window while something else is done.
    fn write_while(&self, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        std::thread::scope(|scope| {
            let n_threads = self.len.div_ceil(PIECE_BYTES).min(PIECES_IN_FLIGHT);
            let writers: Vec<_> = (0..n_threads)
                .map(|_| scope.spawn(|| self.write_some()))
                .collect();
            let done = meanwhile();
            for writer in writers {
                writer.join().map_err(|_| {
                    Error::new(Kind::Io, "a writer thread died").path(&self.file.path)
                })??;
            }
            done
        })
    }

    fn write_some(&self) -> Result<()> {
        loop {
            let from = self.next.fetch_add(PIECE_BYTES as u64, Ordering::Relaxed) as usize;
            if from >= self.len {
                return Ok(());
            }
            if let Some(control) = self.control {
                control.check()?;
            }
            let piece = &self.window[from..(from + PIECE_BYTES).min(self.len)];
            let at = self.start + from as u64;
            // Of what is meant to be written, whatever the disk makes of it.
            for (chunk, sum) in piece
                .chunks(CHUNK_BYTES)
                .zip(&self.sums[at as usize / CHUNK_BYTES..])
            {
                sum.store(crc32c(0, chunk), Ordering::Relaxed);
            }
            self.file.write_piece(at, piece)?;
            if let Some(control) = self.control {
                control.advance(piece.len() as u64);
            }
        }
    }
}

/// A file under a temporary name, removed on drop unless it was published.
struct Temporary {
    path: PathBuf,
    buffered: File,
    direct: Option<File>,
    is_published: bool,
}

impl Temporary {
    fn create(path: &Path, n_bytes: u64, options: &Options) -> Result<Self> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name = path.file_name().ok_or_else(|| {
            Error::new(Kind::Argument, format!("{} names no file", path.display()))
        })?;
        // Not ending in `.safetensors`, so that no reader takes it for a shard.
        let serial = COUNTER.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_file_name(format!(
            ".{}.{}-{serial}.tmp",
            name.to_string_lossy(),
            std::process::id()
        ));
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = || rustix::fs::open(&temporary, flags, Mode::from_raw_mode(options.mode));
        let opened = open().or_else(|errno| {
            // A dead process with our number left one of this name behind.
            if errno == rustix::io::Errno::EXIST {
                rustix::fs::unlink(&temporary)?;
                return open();
            }
            Err(errno)
        });
        let buffered =
            opened.map_err(|errno| Error::io("cannot create", &temporary, &errno.into()))?;
        let mut this = Self {
            path: temporary,
            buffered: File::from(buffered),
            direct: None,
            is_published: false,
        };
        match rustix::fs::fallocate(&this.buffered, FallocateFlags::empty(), 0, n_bytes.max(1)) {
            Ok(())
            | Err(
                rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS | rustix::io::Errno::INVAL,
            ) => {}
            Err(errno) => {
                return Err(Error::io(
                    &format!("cannot reserve {n_bytes} bytes for"),
                    path,
                    &errno.into(),
                )
                .hint("free some space, or choose another destination"));
            }
        }
        if options.direct && n_bytes >= PIECE_BYTES as u64 {
            let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            // Refused by tmpfs and some network file systems: then all writes are buffered.
            this.direct = rustix::fs::open(&this.path, flags, Mode::empty())
                .ok()
                .map(File::from);
        }
        Ok(this)
    }

    fn write_piece(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let failed = |error: std::io::Error| {
            let error = Error::io("cannot write", &self.path, &error);
            error.hint("the destination is unchanged; free space or choose another one if the disk is full")
        };
        let direct_len = if self.direct.is_some() {
            bytes.len() / DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES
        } else {
            0
        };
        let (aligned, tail) = bytes.split_at(direct_len);
        if let Some(direct) = &self.direct
            && !aligned.is_empty()
        {
            match direct.write_all_at(aligned, at) {
                // Opened, but this device wants a larger alignment: the page cache does it.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) =>
                {
                    self.buffered.write_all_at(aligned, at).map_err(failed)?;
                }
                other => other.map_err(failed)?,
            }
        }
        if !tail.is_empty() {
            self.buffered
                .write_all_at(tail, at + direct_len as u64)
                .map_err(failed)?;
        }
        Ok(())
    }

    fn publish(mut self, path: &Path, durable: bool) -> Result<()> {
        if durable {
            // After a failed sync the file's pages can no longer be trusted: it is dropped, never synced again.
            self.buffered
                .sync_all()
                .map_err(|error| Error::io("cannot sync", &self.path, &error))?;
        }
        std::fs::rename(&self.path, path)
            .map_err(|error| Error::io("cannot rename to", path, &error))?;
        self.is_published = true;
        if durable {
            sync_folder(
                path.parent()
                    .filter(|p| !p.as_os_str().is_empty())
                    .unwrap_or(Path::new(".")),
            )?;
        }
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_published {
            // Already failing: what could be said of this failure helps nobody.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Renames a file or folder: onto a name that must be free, or exchanging the two names in one step.
///
/// Where a file system cannot exchange, the old one is moved aside, the new one in, and the old one back to the first
/// name; a crash between leaves both under one of these names.
pub fn rename(from: &Path, to: &Path, exchange: bool) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    let flags = if exchange {
        RenameFlags::EXCHANGE
    } else {
        RenameFlags::NOREPLACE
    };
    match renameat_with(CWD, from, CWD, to, flags) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        other => return other.map_err(Into::into),
    }
    if !exchange {
        if to.try_exists()? {
            return Err(Errno::EXIST.into());
        }
        return std::fs::rename(from, to);
    }
    let mut aside = from.as_os_str().to_owned();
    aside.push(".old");
    std::fs::rename(to, &aside)?;
    if let Err(error) = std::fs::rename(from, to) {
        std::fs::rename(&aside, to)?;
        return Err(error);
    }
    std::fs::rename(&aside, from)
}

/// Makes the entries of a folder durable.
pub fn sync_folder(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|folder| folder.sync_all());
    synced.map_err(|error| Error::io("cannot sync folder", path, &error))
}
