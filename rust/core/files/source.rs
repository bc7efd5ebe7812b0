#![expect(
    unsafe_code,
    reason = "mapping a file is unsafe; `LocalFile` documents the risk. `close` reports errors"
)]
//! Sources of stored bytes: an opened file that is mapped or read by positioned reads, or ranges of a remote object.
//!
//! On local file systems the file is mapped, so that bytes are copied once, out of the page cache. On network file
//! systems, where maps are slow, large positioned reads are used. Other stores implement [`Ranges`].
//!
//! Only this module of the crate opens or maps files for reading.

use crate::error::{Error, Kind, Printable, Result};
use memmap2::{Mmap, MmapMut, MmapOptions};
use rustix::fs::{Mode, OFlags};
use std::fmt;
use std::fs::File;
#[cfg(target_os = "linux")]
use std::os::fd::AsRawFd;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const DIRECT_BLOCK_BYTES: usize = 4096;
const WILL_NEED_BYTES: usize = 128 << 10;

/// How the bytes of a file are fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Method {
    /// Map on a local file system, read elsewhere, and where the process has mapped 32,768 files. Long runs of a mapped
    /// file are read if that is faster.
    #[default]
    Auto,
    /// Map.
    Map,
    /// Positioned reads.
    Read,
}

/// An object outside the local file system whose ranges can be read, by any thread.
///
/// All calls return bytes of the same version of the object. If the object was replaced or truncated, the
/// implementation returns an error of [`Kind::Damaged`].
pub trait Ranges: fmt::Debug + Send + Sync {
    /// Fills a buffer from a position. The range is inside the object.
    fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()>;

    /// Returns a range, fetched if needed, borrowed until the object is dropped; `None` if [`Self::is_borrowable`] is
    /// false.
    fn bytes(&self, _start: u64, _len: u64) -> Result<Option<&[u8]>> {
        Ok(None)
    }

    /// Whether [`Self::bytes`] returns any range.
    fn is_borrowable(&self) -> bool {
        false
    }

    /// Whether a range is in memory, so that [`Self::bytes`] fetches nothing; false if unknown.
    fn is_resident(&self, _start: u64, _len: u64) -> bool {
        false
    }

    /// Whether each read is a request that takes long before its first byte: ranges are requested early, several at once.
    fn is_remote(&self) -> bool {
        false
    }

    /// Fills parts, which are sorted and apart. One request can fetch several, and what lies between them.
    fn read_parts(&self, parts: &mut [Part<'_>]) -> Result<()> {
        for (start, part) in parts {
            self.read_at(*start, part)?;
        }
        Ok(())
    }

    /// How requests are made, by how long earlier ones took.
    fn link(&self) -> Link {
        Link::default()
    }
}

/// The first byte of a range of a source, and a buffer for its bytes.
pub type Part<'a> = (u64, &'a mut [u8]);

/// The first byte and the end of sorted parts and what is between them.
pub fn span_of(parts: &[Part<'_>]) -> (u64, u64) {
    let end_of = |part: &Part<'_>| part.0 + part.1.len() as u64;
    let (first, last) = (parts.first(), parts.last());
    (first.map_or(0, |part| part.0), last.map_or(0, end_of))
}

/// Copies what some bytes of a source, from a position on, hold of sorted parts.
pub fn copy_to_parts(bytes: &[u8], at: u64, parts: &mut [Part<'_>]) {
    let end = at + bytes.len() as u64;
    let first = parts.partition_point(|(start, part)| start + part.len() as u64 <= at);
    for (start, part) in parts[first..].iter_mut().take_while(|part| part.0 < end) {
        let from = at.max(*start);
        let until = end.min(*start + part.len() as u64);
        part[(from - *start) as usize..(until - *start) as usize]
            .copy_from_slice(&bytes[(from - at) as usize..(until - at) as usize]);
    }
}

/// How requests to another host are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// To read a gap of so many bytes takes as long as another request.
    pub gap_bytes: u64,
    /// Requests at once. It changes while they are made.
    pub n_at_once: usize,
}

impl Default for Link {
    fn default() -> Self {
        // A request of an object store takes 20 to 40 ms before its first byte, and a connection 85 to 90 MB/s. More than
        // 32 at once are not faster on most.
        Self {
            gap_bytes: 2 << 20,
            n_at_once: 32,
        }
    }
}

/// An opened source of bytes of a fixed size.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    n_bytes: u64,
    store: Store,
}

#[derive(Debug)]
enum Store {
    File(LocalFile),
    Ranges(Box<dyn Ranges>),
}

/// The state of a file, by which a change of its content is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Device number of the file.
    pub device: u64,
    /// Inode number of the file.
    pub inode: u64,
    /// Size in bytes.
    pub n_bytes: u64,
    /// When the content was last modified, in nanoseconds since 1970.
    pub modified_ns: i64,
    /// When content or attributes were last changed, in nanoseconds since 1970.
    pub changed_ns: i64,
}

impl Stamp {
    fn of(status: &std::fs::Metadata) -> Self {
        let ns =
            |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
        Self {
            device: status.dev(),
            inode: status.ino(),
            n_bytes: status.len(),
            modified_ns: ns(status.mtime(), status.mtime_nsec()),
            changed_ns: ns(status.ctime(), status.ctime_nsec()),
        }
    }

    /// The state of the file that a path names now, links followed; `None`: there is none.
    ///
    /// # Errors
    /// The system cannot examine it.
    pub fn of_path(path: &Path) -> Result<Option<Self>> {
        match std::fs::metadata(path) {
            Ok(status) => Ok(Some(Self::of(&status))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("cannot examine", path, &error)),
        }
    }

    /// Whether size and modification time are the same: the content of one file was not modified.
    pub fn has_same_content(&self, other: &Self) -> bool {
        (self.n_bytes, self.modified_ns) == (other.n_bytes, other.modified_ns)
    }

    fn identity(&self) -> (u64, u64) {
        (self.device, self.inode)
    }
}

/// An opened regular file. All reads return bytes of this file, also if another file gets its name.
///
/// The descriptor stays open while the process has few of them. Beyond 512 descriptors, or half of the limit of the
/// process, the file is opened again for each read, and the read fails if it is another file. A map needs no
/// descriptor.
///
/// A map shows the current content of the file: changes in place by another process are visible (this crate never
/// changes a published file). If another process truncates the file, a copy fails with an error, because every range is
/// faulted in by `MADV_POPULATE_READ` before it is accessed. A truncation between these two steps terminates the
/// process by SIGBUS, as for every user of maps.
#[derive(Debug)]
struct LocalFile {
    follow_links: bool,
    fd: Option<FdSlot>,
    /// The state of the file when it was opened.
    stamp: Stamp,
    map: Option<FileMap>,
    /// Whether the system reports the resident pages of the file to this process.
    #[cfg_attr(
        not(target_os = "linux"),
        expect(dead_code, reason = "asked on Linux only")
    )]
    knows_residency: bool,
    /// Whether positioned reads may replace the map: the caller did not select it.
    may_read: bool,
}

/// An open descriptor. The number of slots in a process is bounded.
#[derive(Debug)]
struct FdSlot(File);

static N_FD_SLOTS: AtomicU64 = AtomicU64::new(0);
const MAX_FD_SLOTS: u64 = 512;

impl FdSlot {
    fn new(file: File) -> Option<Self> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let most = limit.map_or(MAX_FD_SLOTS, |limit| (limit / 2).min(MAX_FD_SLOTS));
        if N_FD_SLOTS.fetch_add(1, Ordering::Relaxed) >= most {
            N_FD_SLOTS.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Self(file))
    }
}

impl Drop for FdSlot {
    fn drop(&mut self) {
        N_FD_SLOTS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A map of a complete file. Their number is bounded: Linux gives a process 65,530 maps by default, and memory that it
/// allocates needs maps as well.
#[derive(Debug)]
struct FileMap(Mmap);

static N_MAPS: AtomicU64 = AtomicU64::new(0);
const MAX_MAPS: u64 = 32_768;

impl FileMap {
    /// Maps a file; `None` if the number is `bounded` and the process has that many.
    fn new(file: &File, bounded: bool) -> std::io::Result<Option<Self>> {
        if bounded && N_MAPS.load(Ordering::Relaxed) >= MAX_MAPS {
            return Ok(None);
        }
        // SAFETY: the map is read only through `Source::bytes`, which faults each range in first. The system cannot
        // prevent that another process changes or truncates the file; `LocalFile` documents the effect.
        let map = unsafe { MmapOptions::new().map(file) }?;
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        N_MAPS.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Self(map)))
    }
}

impl std::ops::Deref for FileMap {
    type Target = Mmap;

    fn deref(&self) -> &Mmap {
        &self.0
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        N_MAPS.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Held(Vec<u8>);

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Ranges for Held {
    fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
        let start = start as usize;
        let from = self.0.get(start..start.saturating_add(to.len()));
        let from = from.ok_or_else(|| Error::damaged("a range lies beyond the bytes"))?;
        to.copy_from_slice(from);
        Ok(())
    }
}

/// Opens the object that a URL names.
type OpenObject = fn(&Path) -> Result<Source>;

static OPEN_OBJECT: OnceLock<OpenObject> = OnceLock::new();

/// Sets what opens objects outside the local file system. The first call counts.
pub fn set_object_opener(open: OpenObject) {
    OPEN_OBJECT.get_or_init(|| open);
}

/// Whether a path is the URL of an object, as `s3://bucket/key`, and not the path of a local file.
pub fn is_url(path: &Path) -> bool {
    let text = path.as_os_str().as_encoded_bytes();
    let scheme = text
        .iter()
        .take_while(|byte| byte.is_ascii_alphanumeric())
        .count();
    scheme >= 2 && text[scheme..].starts_with(b"://")
}

fn open_object(path: &Path, method: Method) -> Result<Source> {
    if method == Method::Map {
        let message = format!(
            "{} is not on a file system and cannot be mapped",
            show(path)
        );
        return Err(Error::new(Kind::Argument, message)
            .path(path)
            .hint("leave the method out"));
    }
    let Some(open) = OPEN_OBJECT.get() else {
        let message = format!(
            "{}: this build of reshard reads local files only",
            show(path)
        );
        return Err(Error::new(Kind::Unsupported, message)
            .path(path)
            .hint("install a wheel of reshard, or build it with the feature `remote`"));
    };
    open(path)
}

impl Source {
    /// Opens a regular file, or the object that a URL names. With `follow_links` the last component of the path may be a
    /// symbolic link.
    pub fn open(path: &Path, follow_links: bool, method: Method) -> Result<Self> {
        if is_url(path) {
            return open_object(path, method);
        }
        let (file, stamp) = open_regular(path, follow_links)?;
        let n_bytes = stamp.n_bytes;
        let is_mapped = n_bytes > 0
            && match method {
                Method::Auto => is_local(&file),
                Method::Map => true,
                Method::Read => false,
            };
        let map = if is_mapped {
            FileMap::new(&file, method == Method::Auto)
                .map_err(|error| Error::io("cannot map", path, &error))?
        } else {
            None
        };
        let knows_residency = map.is_some() && knows_residency(&file, path);
        let file = LocalFile {
            follow_links,
            fd: FdSlot::new(file),
            stamp,
            map,
            knows_residency,
            may_read: method == Method::Auto,
        };
        Ok(Self {
            path: path.to_owned(),
            n_bytes,
            store: Store::File(file),
        })
    }

    /// A source of an object of `n_bytes` bytes that is read by ranges; `path` names it in messages.
    pub fn of_ranges(path: PathBuf, n_bytes: u64, ranges: Box<dyn Ranges>) -> Self {
        Self {
            path,
            n_bytes,
            store: Store::Ranges(ranges),
        }
    }

    /// A source of bytes in memory; `path` is for messages.
    pub fn of_bytes(path: PathBuf, bytes: Vec<u8>) -> Self {
        Self::of_ranges(path, bytes.len() as u64, Box::new(Held(bytes)))
    }

    /// The path under which the source was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether positioned reads use an open descriptor.
    pub fn has_fd(&self) -> bool {
        matches!(&self.store, Store::File(LocalFile { fd: Some(_), .. }))
    }

    /// Whether positioned reads may replace a map where they are faster: the method is [`Method::Auto`], and a
    /// descriptor is open.
    pub fn may_read(&self) -> bool {
        matches!(
            &self.store,
            Store::File(LocalFile {
                fd: Some(_),
                may_read: true,
                ..
            })
        )
    }

    /// The state of the file when it was opened; `None` if the source is not a local file.
    pub fn stamp(&self) -> Option<Stamp> {
        match &self.store {
            Store::File(file) => Some(file.stamp),
            Store::Ranges(_) => None,
        }
    }

    /// The state of the opened file now, also if its path names another file; `None` if no descriptor is open.
    ///
    /// # Errors
    /// The system cannot examine it.
    pub fn stamp_now(&self) -> Result<Option<Stamp>> {
        let Store::File(LocalFile {
            fd: Some(FdSlot(file)),
            ..
        }) = &self.store
        else {
            return Ok(None);
        };
        let status = file.metadata();
        let status = status.map_err(|error| Error::io("cannot examine", &self.path, &error))?;
        Ok(Some(Stamp::of(&status)))
    }

    /// Size in bytes when the source was opened.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Whether ranges can be borrowed: the file is mapped, or the object has borrowable ranges.
    pub fn is_mapped(&self) -> bool {
        match &self.store {
            Store::File(file) => file.map.is_some(),
            Store::Ranges(ranges) => ranges.is_borrowable(),
        }
    }

    /// Whether each read is a request to another host, see [`Ranges::is_remote`].
    pub fn is_remote(&self) -> bool {
        match &self.store {
            Store::File(_) => false,
            Store::Ranges(ranges) => ranges.is_remote(),
        }
    }

    /// How requests are made, see [`Ranges::link`].
    pub fn link(&self) -> Link {
        match &self.store {
            Store::File(_) => Link::default(),
            Store::Ranges(ranges) => ranges.link(),
        }
    }

    /// Fills parts, see [`Ranges::read_parts`].
    pub(crate) fn read_parts(&self, parts: &mut [Part<'_>]) -> Result<()> {
        let (start, end) = span_of(parts);
        self.range(start, end - start)?;
        match &self.store {
            Store::Ranges(ranges) => ranges.read_parts(parts),
            Store::File(_) => parts
                .iter_mut()
                .try_for_each(|(start, part)| self.read_at(*start, part)),
        }
    }

    /// Borrows a range and faults it in; `None` if ranges cannot be borrowed.
    pub fn bytes(&self, start: u64, len: u64) -> Result<Option<&[u8]>> {
        let map = match &self.store {
            Store::File(file) => &file.map,
            Store::Ranges(ranges) => {
                self.range(start, len)?;
                return ranges.bytes(start, len);
            }
        };
        let Some(map) = map else {
            return Ok(None);
        };
        let range = self.range(start, len)?;
        #[cfg(target_os = "linux")]
        if len > 0
            && let Err(error) =
                map.advise_range(memmap2::Advice::PopulateRead, range.start, range.len())
        {
            self.explain_populate(&error, start + len)?;
        }
        Ok(Some(&map[range]))
    }

    /// As [`Self::bytes`], of a range that the caller has faulted in shortly before.
    pub(crate) fn faulted_bytes(&self, start: u64, len: u64) -> Result<Option<&[u8]>> {
        match &self.store {
            Store::File(file) => {
                let range = self.range(start, len)?;
                Ok(file.map.as_ref().map(|map| &map[range]))
            }
            Store::Ranges(_) => self.bytes(start, len),
        }
    }

    /// Whether a range is in memory, so that borrowing it reads nothing; false if unknown.
    pub fn is_resident(&self, start: u64, len: u64) -> bool {
        let Ok(range) = self.range(start, len) else {
            return false;
        };
        match &self.store {
            Store::File(file) => file.is_resident(range),
            Store::Ranges(ranges) => ranges.is_resident(start, len),
        }
    }

    /// Number of pages of a range of a mapped file that are in the page cache or being read; `None` if unknown.
    pub(crate) fn n_resident_pages(&self, start: u64, len: u64) -> Option<u64> {
        match &self.store {
            Store::File(file) => file.n_resident_pages(self.range(start, len).ok()?),
            Store::Ranges(_) => None,
        }
    }

    /// Whether ranges can be requested by [`Self::will_need`]: the source is a mapped file.
    pub(crate) fn is_file_map(&self) -> bool {
        matches!(&self.store, Store::File(LocalFile { map: Some(_), .. }))
    }

    /// Starts to read the pages of a range of a mapped file, and no others, and returns at once.
    pub(crate) fn will_need(&self, start: u64, len: u64) {
        if let Store::File(LocalFile { map: Some(map), .. }) = &self.store
            && let Ok(range) = self.range(start, len)
        {
            // Linux cuts a request to the largest of the disk or its readahead, 128 KiB by default. An error of the disk
            // is reported by the read that follows.
            for at in range.clone().step_by(WILL_NEED_BYTES) {
                let n_bytes = WILL_NEED_BYTES.min(range.end - at);
                let _ = map.advise_range(memmap2::Advice::WillNeed, at, n_bytes);
            }
        }
    }

    /// Unmaps the pages of a range of a mapped file that was copied; they stay in the page cache, and the next access
    /// maps them again. The threads that copy do this concurrently. When a map is closed, one thread does it.
    pub(crate) fn release(&self, start: u64, len: u64) {
        #[cfg(target_os = "linux")]
        if let Store::File(LocalFile { map: Some(map), .. }) = &self.store
            && let Ok(range) = self.range(start, len)
        {
            let page = rustix::param::page_size();
            let (first, end) = (range.start.next_multiple_of(page), range.end / page * page);
            if first < end {
                // SAFETY: the map is shared and never written, so that it has no content that is not in the file.
                let _ = unsafe {
                    map.unchecked_advise_range(
                        memmap2::UncheckedAdvice::DontNeed,
                        first,
                        end - first,
                    )
                };
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (start, len);
    }

    /// Handles a failed `MADV_POPULATE_READ`. Kernels before 5.14 do not support it; the size of the file is checked
    /// instead.
    #[cfg(target_os = "linux")]
    fn explain_populate(&self, error: &std::io::Error, end: u64) -> Result<()> {
        let Store::File(file) = &self.store else {
            return Ok(());
        };
        let now = file.with_opened(&self.path, |file| Ok(len_of(file)))?;
        if now < end {
            return Err(self.shrunk(now));
        }
        match error.raw_os_error() {
            Some(code) if code == rustix::io::Errno::INVAL.raw_os_error() => Ok(()),
            _ => Err(Error::io("cannot read", &self.path, error)),
        }
    }

    /// Fills a buffer from a position.
    pub fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
        self.read_at_or(start, to, |now| self.shrunk(now))
    }

    /// As [`Self::read_at`]. If the file was truncated, `shrunk` creates the error from its current size.
    pub fn read_at_or(
        &self,
        start: u64,
        to: &mut [u8],
        shrunk: impl FnOnce(u64) -> Error,
    ) -> Result<()> {
        self.range(start, to.len() as u64)?;
        match &self.store {
            Store::File(file) => file.with_opened(&self.path, |file| {
                file.read_exact_at(to, start)
                    .map_err(|error| match error.kind() {
                        std::io::ErrorKind::UnexpectedEof => shrunk(len_of(file)),
                        _ => Error::io("cannot read", &self.path, &error),
                    })
            }),
            Store::Ranges(ranges) => ranges.read_at(start, to),
        }
    }

    /// A private copy-on-write map of the complete file: writes to it change neither the file nor other maps. `None` if
    /// the source is not a local file.
    pub fn private_map(&self) -> Result<Option<MmapMut>> {
        let Store::File(file) = &self.store else {
            return Ok(None);
        };
        file.with_opened(&self.path, |file| {
            // SAFETY: as in `FileMap::new`. The map is returned as plain memory; `LocalFile` documents the effect of a
            // truncation.
            let map = unsafe { MmapOptions::new().map_copy(file) };
            let map = map.map_err(|error| Error::io("cannot map", &self.path, &error))?;
            let now = len_of(file);
            if now < self.n_bytes || (map.len() as u64) < self.n_bytes {
                return Err(self.shrunk(now));
            }
            Ok(Some(map))
        })
    }

    /// Reads that bypass the page cache where the file system supports it.
    pub fn uncached(&self) -> Result<Uncached<'_>> {
        let Store::File(file) = &self.store else {
            return Ok(Uncached {
                source: self,
                direct: None,
            });
        };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let direct = open_direct(&self.path, flags);
        if direct.is_none() {
            file.with_opened(&self.path, |file| {
                flush_pages(file);
                Ok(())
            })?;
        }
        Ok(Uncached {
            source: self,
            direct,
        })
    }

    fn range(&self, start: u64, len: u64) -> Result<std::ops::Range<usize>> {
        let end = start.checked_add(len).filter(|end| *end <= self.n_bytes);
        let end = end.ok_or_else(|| {
            let message = format!(
                "{} has {} bytes; {len} bytes at {start} were requested",
                show(&self.path),
                self.n_bytes
            );
            Error::damaged(message).path(&self.path)
        })?;
        Ok(start as usize..end as usize)
    }

    fn shrunk(&self, now: u64) -> Error {
        let message = format!(
            "{} had {} bytes when it was opened and has {now} now",
            show(&self.path),
            self.n_bytes
        );
        Error::damaged(message)
            .path(&self.path)
            .hint("another process truncated the file while it was in use")
    }
}

impl LocalFile {
    /// Calls `action` with the file, which is opened again if its descriptor was not kept.
    fn with_opened<T>(&self, path: &Path, action: impl FnOnce(&File) -> Result<T>) -> Result<T> {
        if let Some(FdSlot(file)) = &self.fd {
            return action(file);
        }
        let (file, stamp) = open_regular(path, self.follow_links)?;
        if stamp.identity() != self.stamp.identity() {
            let message = format!(
                "{} was replaced by another file after it was opened",
                show(path)
            );
            return Err(Error::damaged(message)
                .path(path)
                .hint("open the checkpoint again"));
        }
        action(&file)
    }

    /// Whether a range of the map is in the page cache.
    fn is_resident(&self, range: std::ops::Range<usize>) -> bool {
        let n_pages = n_pages(range.start as u64, range.end as u64);
        self.n_resident_pages(range) == Some(n_pages)
    }

    /// Number of pages of a range of the map that are in the page cache or being read; `None` if unknown.
    #[cfg(target_os = "linux")]
    fn n_resident_pages(&self, range: std::ops::Range<usize>) -> Option<u64> {
        let (Some(map), true) = (&self.map, self.knows_residency) else {
            return None;
        };
        let first = range.start - range.start % rustix::param::page_size();
        self.fd
            .as_ref()
            .and_then(|FdSlot(file)| n_cached_pages(file, range.start as u64, range.len() as u64))
            .or_else(|| n_pages_in_memory(&map[first..range.end]))
    }

    /// Number of pages of a range of the map that are in the page cache: unknown on this system.
    #[cfg(not(target_os = "linux"))]
    fn n_resident_pages(&self, _range: std::ops::Range<usize>) -> Option<u64> {
        None
    }
}

/// Number of pages that a range of bytes lies in.
pub(crate) fn n_pages(start: u64, end: u64) -> u64 {
    let page = rustix::param::page_size() as u64;
    end.div_ceil(page).saturating_sub(start / page)
}

/// Reads of a source that bypass the page cache where possible.
#[derive(Debug)]
pub struct Uncached<'a> {
    source: &'a Source,
    direct: Option<File>,
}

impl Uncached<'_> {
    /// Reads `len` bytes from a position. The buffer is page-aligned, and its size is a multiple of 4096 bytes.
    pub fn read_at(&self, start: u64, len: usize, buffer: &mut [u8]) -> Result<()> {
        let direct = self.direct.as_ref();
        if direct.is_some_and(|file| read_direct(file, start, buffer, len)) {
            return Ok(());
        }
        self.source.read_at(start, &mut buffer[..len])
    }
}

/// Number of pages of a range of a file in the page cache, by cachestat(2) of Linux 6.5 and later. It counts folios of
/// many pages each and takes a fiftieth of the time of mincore(2).
#[cfg(target_os = "linux")]
fn n_cached_pages(file: &File, start: u64, len: u64) -> Option<u64> {
    // `libc` does not define it for every target. The number is the same on all but alpha.
    const SYS_CACHESTAT: libc::c_long = 451;
    let range = [start, len];
    let mut found = [0_u64; 5];
    // SAFETY: the call reads two numbers, start and length, and writes five; the first one is the number of cached
    // pages. The descriptor is open as long as `file` lives.
    let status = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_raw_fd(),
            range.as_ptr(),
            found.as_mut_ptr(),
            0,
        )
    };
    (status == 0).then_some(found[0])
}

/// Number of pages of a part of a map, which begins with a page, that are in memory, by mincore(2).
#[cfg(target_os = "linux")]
fn n_pages_in_memory(part: &[u8]) -> Option<u64> {
    let mut pages = vec![0_u8; part.len().div_ceil(rustix::param::page_size())];
    let at = part.as_ptr().cast_mut().cast();
    // SAFETY: the part is inside a live map and page-aligned. The call writes one byte per page to `pages`, which has
    // that many bytes.
    let status = unsafe { libc::mincore(at, part.len(), pages.as_mut_ptr().cast()) };
    (status == 0).then(|| pages.iter().filter(|page| **page & 1 == 1).count() as u64)
}

/// Opens a regular file. Returns it and its state.
fn open_regular(path: &Path, follow_links: bool) -> Result<(File, Stamp)> {
    // NONBLOCK: opening a FIFO must not block.
    let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    if !follow_links {
        flags |= OFlags::NOFOLLOW;
    }
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = opened.map_err(|errno| match errno {
        rustix::io::Errno::LOOP if !follow_links => Error::damaged(format!(
            "{} is a symbolic link; expected a regular file",
            show(path)
        ))
        .path(path),
        rustix::io::Errno::MFILE => Error::io("cannot open", path, &errno.into())
            .hint("raise the limit of open files (`ulimit -n`)"),
        _ => Error::io("cannot open", path, &errno.into()),
    })?;
    let file = File::from(file);
    let status = file
        .metadata()
        .map_err(|error| Error::io("cannot examine", path, &error))?;
    if !status.is_file() {
        return Err(Error::damaged(format!("{} is not a regular file", show(path))).path(path));
    }
    Ok((file, Stamp::of(&status)))
}

/// Closes a file that was written. Network file systems send what was written, and report what fails.
pub(crate) fn close(file: File) -> std::io::Result<()> {
    let fd = file.into_raw_fd();
    // SAFETY: `into_raw_fd` gives up the ownership of an open descriptor: it is valid, and nothing else closes it.
    unsafe { rustix::io::try_close(fd) }.map_err(Into::into)
}

/// Opens a file for transfers that bypass the page cache; none where the system or the file system has none.
pub(crate) fn open_direct(path: &Path, flags: OFlags) -> Option<File> {
    #[cfg(target_os = "linux")]
    let opened = rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty());
    #[cfg(not(target_os = "linux"))]
    let opened = {
        let _ = (path, flags);
        Err::<File, _>(rustix::io::Errno::OPNOTSUPP)
    };
    opened.ok().map(File::from)
}

/// Starts to write the dirty pages of a file to the disk, and drops the clean ones from the page cache. Dirty pages stay:
/// they are the only copy.
pub(crate) fn flush_pages(file: &File) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// Reads `len` bytes into a buffer with a size in complete blocks; false if a direct read is not possible.
fn read_direct(file: &File, start: u64, buffer: &mut [u8], len: usize) -> bool {
    let block_end = len.next_multiple_of(DIRECT_BLOCK_BYTES).min(buffer.len());
    let mut done = 0;
    while done < len {
        match file.read_at(&mut buffer[done..block_end], start + done as u64) {
            Ok(n) if n > 0 => done += n,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            _ => return false,
        }
        // After a short read that ends inside a block only the end of the file can follow.
        if done < len && !done.is_multiple_of(DIRECT_BLOCK_BYTES) {
            return false;
        }
    }
    true
}

/// Whether mincore(2) reports the page cache. For files that the caller neither owns nor may write it reports all pages
/// as resident.
fn knows_residency(file: &File, path: &Path) -> bool {
    let is_owner = file
        .metadata()
        .is_ok_and(|status| status.uid() == rustix::process::geteuid().as_raw());
    is_owner || rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok()
}

/// Current size of a file; 0 if it is unknown.
fn len_of(file: &File) -> u64 {
    file.metadata().map_or(0, |status| status.len())
}

fn show(path: &Path) -> String {
    Printable(&path.to_string_lossy()).to_string()
}

/// Whether a file is on a local file system, which has its page cache on this host.
#[cfg(target_os = "linux")]
fn is_local(file: &File) -> bool {
    // Magic numbers of statfs(2).
    const LOCAL: [rustix::fs::FsWord; 9] = [
        0xEF53,      // ext2, ext3, ext4
        0x5846_5342, // xfs
        0x9123_683E, // btrfs
        0x0102_1994, // tmpfs
        0x794C_7630, // overlayfs
        0xF2F5_2010, // f2fs
        0x2FC1_2FC1, // zfs
        0xCA45_1A4E, // bcachefs
        0x7371_7368, // squashfs
    ];
    rustix::fs::fstatfs(file).is_ok_and(|status| LOCAL.contains(&status.f_type))
}

#[cfg(not(target_os = "linux"))]
fn is_local(_file: &File) -> bool {
    false
}

/// The error of a read from a checkpoint that was closed.
pub(crate) fn closed() -> Error {
    Error::new(Kind::Argument, "the checkpoint is closed").hint("open it again")
}

/// The path of a local file that is opened later, when the program may have changed its working folder.
#[derive(Debug, Clone)]
pub struct LocalPath {
    named: PathBuf,
    place: PathBuf,
}

impl LocalPath {
    /// A path, relative to the current working folder.
    pub fn of(path: &Path) -> Self {
        Self {
            named: path.to_owned(),
            place: absolute(path),
        }
    }

    /// The absolute path.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Opens the file, see [`Source::open`]. Errors name it as it was given, as long as that is the same path.
    pub fn open(&self, follow_links: bool, method: Method) -> Result<Source> {
        let is_moved = absolute(&self.named) != self.place;
        let path = if is_moved { &self.place } else { &self.named };
        Source::open(path, follow_links, method)
    }
}

/// The absolute form of a path; the path itself if the working folder is not known.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_file_is_an_error_by_map_and_by_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for method in [Method::Map, Method::Read] {
            std::fs::write(&path, vec![7_u8; 3 << 20]).unwrap();
            let source = Source::open(&path, true, method).unwrap();
            File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_len(4096)
                .unwrap();
            let mut to = vec![0; 2 << 20];
            let error = if source.is_mapped() {
                source.bytes(1 << 20, 2 << 20).map(|_| ()).unwrap_err()
            } else {
                source.read_at(1 << 20, &mut to).unwrap_err()
            };
            assert_eq!(error.kind(), Kind::Damaged, "{error}");
            assert!(error.message().contains("has 4096 now"), "{error}");
        }
    }

    #[test]
    fn a_released_range_can_be_borrowed_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let content: Vec<u8> = (0..1_000_001_u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let source = Source::open(&path, true, Method::Map).unwrap();
        let all = source.bytes(0, content.len() as u64).unwrap().unwrap();
        for (start, len) in [(0, 1_000_001), (5000, 100), (4096, 4096), (999_000, 1001)] {
            source.release(start, len);
            assert!(all == content, "{start}");
            assert_eq!(
                source.bytes(start, len).unwrap().unwrap(),
                &content[start as usize..(start + len) as usize]
            );
        }
        source.release(1_000_000, 2);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn cachestat_and_mincore_agree_on_the_page_cache() {
        const N: usize = 8 << 20;
        let page = rustix::param::page_size();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7_u8; N + 1]).unwrap();
        let source = Source::open(&path, true, Method::Map).unwrap();
        assert!(source.is_resident(0, N as u64 + 1));
        let Store::File(local) = &source.store else {
            unreachable!("opened as a file")
        };
        let FdSlot(file) = local.fd.as_ref().unwrap();
        file.sync_all().unwrap();
        // File systems differ in what they drop. The test checks only that both calls agree.
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random).unwrap();
        file.read_exact_at(&mut [0; 100], 3 << 20).unwrap();
        let mut n_resident = 0;
        for start in (0..N).step_by(page) {
            let Some(n) = n_cached_pages(file, start as u64, page as u64) else {
                return; // a kernel before 6.5
            };
            let map = &local.map.as_ref().unwrap()[start..start + page];
            assert_eq!(Some(n), n_pages_in_memory(map), "at {start}");
            n_resident += n;
        }
        assert!(n_resident > 0);
        assert_eq!(
            source.is_resident(5, N as u64 - 10),
            n_resident == (N / page) as u64
        );
    }

    #[test]
    fn descriptors_are_bounded_and_a_replaced_file_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"0123456789").unwrap();
        let many: Vec<_> = (0..MAX_FD_SLOTS + 50)
            .map(|_| Source::open(&path, true, Method::Read).unwrap())
            .collect();
        let n_with_fd = many.iter().filter(|source| source.has_fd()).count() as u64;
        assert!(
            n_with_fd <= MAX_FD_SLOTS,
            "{n_with_fd} descriptors are kept"
        );
        let last = many.last().unwrap();
        let mut to = [0; 3];
        last.read_at(4, &mut to).unwrap();
        assert_eq!(&to, b"456");
        std::fs::write(folder.path().join("new"), b"0123456789").unwrap();
        std::fs::rename(folder.path().join("new"), &path).unwrap();
        assert_eq!(last.read_at(4, &mut to).unwrap_err().kind(), Kind::Damaged);
    }

    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::fs::write(folder.path().join("file"), b"x").unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        assert_eq!(
            Source::open(&link, false, Method::Auto).unwrap_err().kind(),
            Kind::Damaged
        );
        assert!(Source::open(&link, true, Method::Auto).is_ok());
        assert_eq!(
            Source::open(folder.path(), true, Method::Auto)
                .unwrap_err()
                .kind(),
            Kind::Damaged
        );
        assert_eq!(
            Source::open(&folder.path().join("no"), true, Method::Auto)
                .unwrap_err()
                .kind(),
            Kind::NotFound
        );
    }
}
