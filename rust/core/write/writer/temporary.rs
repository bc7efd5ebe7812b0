//! A file under a temporary name, which gets its name when it is complete; and a part of a file that several processes
//! write under its name.

use super::durable::sync_folder;
use super::{DIRECT_BLOCK_BYTES, Options, PIECE_BYTES, Sink};
use crate::error::{Error, Kind, Result};
use crate::files::source::open_direct;
use crate::write::route::Route;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::retry_on_intr;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The hint of a write that failed.
pub(crate) fn write_hint(errno: Option<i32>) -> &'static str {
    use rustix::io::Errno;
    match errno.map(Errno::from_raw_os_error) {
        Some(Errno::NOSPC) => {
            "the destination is unchanged; free disk space, or choose another destination"
        }
        Some(Errno::DQUOT) => {
            "the destination is unchanged; the quota on its file system is used up: remove files that count towards it, \
             or choose another destination"
        }
        Some(Errno::FBIG) => {
            "the destination is unchanged; files of this size are not allowed: raise the limit of this process \
             (`ulimit -f`), write smaller files, or choose a file system without such a limit"
        }
        _ => "the destination is unchanged",
    }
}

/// A file that is open for writing.
struct Opened {
    path: PathBuf,
    buffered: File,
    direct: Option<File>,
    is_durable: bool,
    /// Whether pieces may take either route.
    has_routes: bool,
}

/// A file under a temporary name. It is removed on drop unless it was published.
pub(crate) struct TemporaryFile {
    opened: Opened,
    /// The name under which it is published.
    target: PathBuf,
    is_published: bool,
}

/// A range of a file under its name, which other processes fill, too. It stays as it is if it is not completed: to write
/// it again writes the same bytes.
pub(crate) struct FilePart(Opened);

/// A hidden name that no other process uses, also on another host, and that does not end in `.safetensors`, so that
/// readers ignore the file.
fn temporary_name(name: &str) -> String {
    pub(super) const MAX_BYTES: usize = 255; // of a name in a folder
    let random = RandomState::new().hash_one(std::process::id());
    let end = format!(".{random:016x}.tmp");
    let mut kept = name.len().min(MAX_BYTES - 1 - end.len());
    while !name.is_char_boundary(kept) {
        kept -= 1;
    }
    format!(".{}{end}", &name[..kept])
}

impl TemporaryFile {
    pub(crate) fn create(path: &Path, n_bytes: u64, options: &Options) -> Result<Self> {
        let name = path.file_name().ok_or_else(|| {
            Error::new(
                Kind::Argument,
                format!("{} is not the path of a file", path.display()),
            )
        })?;
        let temporary = path.with_file_name(temporary_name(&name.to_string_lossy()));
        let mut opened = Opened::new(&temporary, OFlags::CREATE | OFlags::EXCL, options)?;
        // Small files too: a network file system may report a full disk when a file is closed, which goes unseen.
        let reserved = opened.prepare(path, 0..n_bytes, options);
        let this = Self {
            opened,
            target: path.to_owned(),
            is_published: false,
        };
        reserved.map(|()| this)
    }
}

impl FilePart {
    /// Opens the file, which must be there: one that was created again would lack what others have written.
    pub(super) fn open(path: &Path, range: Range<u64>, options: &Options) -> Result<Self> {
        let mut opened = Opened::new(path, OFlags::empty(), options)?;
        opened.prepare(path, range, options)?;
        Ok(Self(opened))
    }
}

impl Opened {
    fn new(path: &Path, flags: OFlags, options: &Options) -> Result<Self> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | flags;
        // The type has 16 bits on macOS.
        let mode = Mode::from_raw_mode(options.mode as rustix::fs::RawMode);
        let opened = retry_on_intr(|| rustix::fs::open(path, flags, mode));
        let doing = if flags.contains(OFlags::CREATE) {
            "cannot create"
        } else {
            "cannot open"
        };
        let buffered = opened.map_err(|errno| Error::io(doing, path, &errno.into()))?;
        Ok(Self {
            path: path.to_owned(),
            buffered: File::from(buffered),
            direct: None,
            is_durable: options.durable,
            has_routes: false,
        })
    }

    /// Reserves the space of a range, and opens the file for direct writes.
    fn prepare(&mut self, target: &Path, range: Range<u64>, options: &Options) -> Result<()> {
        let n_bytes = range.end - range.start;
        let is_reserved = self.reserve(target, range)?;
        if options.direct && n_bytes >= PIECE_BYTES as u64 {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            // tmpfs and some network file systems do not support it. Then all writes are buffered.
            self.direct = open_direct(&self.path, flags);
        }
        // Without reserved space, a full disk may only be seen when the page cache is written, after the last write.
        self.has_routes = is_reserved && self.direct.is_some() && !options.durable;
        Ok(())
    }

    /// Reserves space: a full disk is an error before anything is written. False if the file system cannot do it.
    fn reserve(&self, target: &Path, range: Range<u64>) -> Result<bool> {
        let n_bytes = range.end - range.start;
        // A range must not be empty, and a file without bytes stays one.
        let (flags, len) = match n_bytes {
            0 => (FallocateFlags::KEEP_SIZE, 1),
            n => (FallocateFlags::empty(), n),
        };
        match retry_on_intr(|| rustix::fs::fallocate(&self.buffered, flags, range.start, len)) {
            Ok(()) => Ok(true),
            Err(
                rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS | rustix::io::Errno::INVAL,
            ) => Ok(false),
            Err(errno) => Err(Error::io(
                &format!("cannot reserve {n_bytes} bytes for"),
                target,
                &errno.into(),
            )
            .hint(write_hint(Some(errno.raw_os_error())))),
        }
    }

    fn sync(&self) -> Result<()> {
        if self.is_durable {
            // After a failed sync the state of the pages is undefined. The file is removed and never synced again.
            self.buffered
                .sync_all()
                .map_err(|error| Error::io("cannot sync", &self.path, &error))?;
        }
        Ok(())
    }

    fn sync_folder_of(&self, path: &Path) -> Result<()> {
        if self.is_durable {
            let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
            sync_folder(folder.unwrap_or(Path::new(".")))?;
        }
        Ok(())
    }

    fn write_at(&self, at: u64, bytes: &[u8], route: Route) -> Result<()> {
        let failed = |error: std::io::Error| {
            let hint = write_hint(error.raw_os_error());
            Error::io("cannot write", &self.path, &error).hint(hint)
        };
        let direct = self.direct.as_ref().filter(|_| route == Route::Direct);
        let direct_len = if direct.is_some() {
            bytes.len() / DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES
        } else {
            0
        };
        let (aligned, tail) = bytes.split_at(direct_len);
        if let Some(direct) = direct
            && !aligned.is_empty()
        {
            match direct.write_all_at(aligned, at) {
                // The device requires a larger alignment: the write is buffered.
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
}

impl Sink for TemporaryFile {
    fn has_routes(&self) -> bool {
        self.opened.has_routes
    }

    fn write_at(&self, at: u64, bytes: &[u8], route: Route) -> Result<()> {
        self.opened.write_at(at, bytes, route)
    }

    fn publish(mut self) -> Result<Vec<String>> {
        self.opened.sync()?;
        std::fs::rename(&self.opened.path, &self.target)
            .map_err(|error| Error::io("cannot rename to", &self.target, &error))?;
        self.is_published = true;
        self.opened.sync_folder_of(&self.target)?;
        Ok(Vec::new())
    }
}

impl Sink for FilePart {
    fn has_routes(&self) -> bool {
        self.0.has_routes
    }

    fn leaves_sums(&self) -> bool {
        true
    }

    fn write_at(&self, at: u64, bytes: &[u8], route: Route) -> Result<()> {
        self.0.write_at(at, bytes, route)
    }

    fn publish(self) -> Result<Vec<String>> {
        self.0.sync()?;
        self.0.sync_folder_of(&self.0.path)?;
        Ok(Vec::new())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.is_published {
            // The caller gets the first error; an error of the removal is ignored.
            let _ = std::fs::remove_file(&self.opened.path);
        }
    }
}
