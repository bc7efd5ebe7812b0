//! Names of files, and making files and folders durable.

use crate::error::{Error, Result};
use rayon::prelude::*;
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Renames a file or folder to an unused name, or exchanges two names atomically.
///
/// If the file system cannot exchange names, `to` is renamed to `<from>.old`, `from` to `to`, and `<from>.old` to
/// `from`. After a crash in between, both exist under two of these three names.
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
    let mut old = from.as_os_str().to_owned();
    old.push(".old");
    std::fs::rename(to, &old)?;
    if let Err(error) = std::fs::rename(from, to) {
        std::fs::rename(&old, to)?;
        return Err(error);
    }
    std::fs::rename(&old, from)
}

/// Makes files and the entries of folders durable, on the current thread pool: a journal commits once what is synced
/// at one time.
///
/// A symbolic link in the place of a file is an error. The error is that of the first path that failed, with its index
/// in `files` followed by `folders`; after it none of them counts as durable, and none may be synced again.
pub fn sync_together(files: &[PathBuf], folders: &[PathBuf]) -> SyncResult {
    let failed: Vec<_> = (0..files.len() + folders.len())
        .into_par_iter()
        .with_max_len(1)
        .filter_map(|index| sync_one(files, folders, index).err())
        .collect();
    failed.into_iter().next().map_or(Ok(()), Err)
}

/// As [`sync_together`], one after the other on the calling thread.
///
/// # Errors
/// As [`sync_together`].
pub fn sync_in_turn(files: &[PathBuf], folders: &[PathBuf]) -> SyncResult {
    (0..files.len() + folders.len()).try_for_each(|index| sync_one(files, folders, index))
}

/// The number of the path that could not be synced, the folders after the files, and why.
pub type SyncResult = std::result::Result<(), (usize, std::io::Error)>;

fn sync_one(files: &[PathBuf], folders: &[PathBuf], index: usize) -> SyncResult {
    let open = |path: &Path, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
    let opened = match files.get(index) {
        // Some network file systems sync only what is open for writing.
        Some(file) => open(file, OFlags::RDWR | OFlags::NOFOLLOW).or_else(|errno| {
            if matches!(errno, rustix::io::Errno::ACCESS | rustix::io::Errno::PERM) {
                return open(file, OFlags::RDONLY | OFlags::NOFOLLOW);
            }
            Err(errno)
        }),
        None => open(
            &folders[index - files.len()],
            OFlags::RDONLY | OFlags::DIRECTORY,
        ),
    };
    let synced = opened
        .map_err(std::io::Error::from)
        .and_then(|handle| File::from(handle).sync_all());
    synced.map_err(|error| (index, error))
}

/// Syncs the entries of a folder.
pub fn sync_folder(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|folder| folder.sync_all());
    synced.map_err(|error| Error::io("cannot sync folder", path, &error))
}
