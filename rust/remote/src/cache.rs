//! What was read of objects, kept in a folder of this host: it is fetched once for all processes of the host.
//!
//! A version of an object is a folder, and each of its blocks a file: the bytes, and a crc32c of each 256 KiB of them. A
//! file that is not complete or does not match counts as missing. Who fetches a block holds a lock on its file, and
//! writes it in place; others wait, and find it. A folder that cannot be written only means that nothing is kept.
//!
//! A process that is forked meanwhile shares the lock, though it does not fetch. So a lock is released by name, not by
//! closing the file, and nobody waits for one longer than 90 seconds: a file whose lock is held for longer is replaced.

use reshard_core::checksum::{CHUNK_BYTES, crc32c};
use reshard_core::{Error, Kind, Result};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// Bytes of a block: of complete chunks.
const BLOCK_BYTES: u64 = 4 << 20;
/// Blocks whose locks are held at once.
const BLOCKS_AT_ONCE: u64 = 8;
/// How often the time of a block that is read is renewed.
const TOUCH_EVERY: Duration = Duration::from_secs(60);
/// The size is looked at when more than this part of it was written.
const SWEEP_PART: u64 = 16;
const SWEEP_LOCK: &str = ".sweep";
/// For a block that another process fetches. Requests are repeated for a minute.
const WAIT: Duration = Duration::from_secs(90);
/// The longest pause between two looks at a lock.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Bytes that this process has written into each folder since it looked at its size.
static WRITTEN: Mutex<BTreeMap<PathBuf, Arc<AtomicU64>>> = Mutex::new(BTreeMap::new());

/// A folder, and how many bytes may be in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cache {
    /// Made if it is missing.
    pub folder: PathBuf,
    /// It holds a little more while several processes write into it.
    pub max_bytes: u64,
}

/// The blocks of one version of an object.
#[derive(Debug)]
pub(crate) struct Cached {
    cache: Cache,
    folder: PathBuf,
    n_bytes: u64,
    wait: Duration,
}

/// A file whose lock this process holds, also if a fork of it has the file open, too.
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = self.0.unlock(); // of all processes that share it
    }
}

impl Cached {
    /// Those of an object with this URL, `ETag` and size.
    pub(crate) fn new(cache: &Cache, url: &str, e_tag: &str, n_bytes: u64) -> Self {
        let name = name_of(&[url.as_bytes(), e_tag.as_bytes(), &n_bytes.to_le_bytes()]);
        Self {
            folder: cache.folder.join(name),
            cache: cache.clone(),
            n_bytes,
            wait: WAIT,
        }
    }

    /// Fills a buffer from a position; `fetch` fetches ranges that are not here.
    pub(crate) fn read_at(
        &self,
        start: u64,
        to: &mut [u8],
        fetch: &dyn Fn(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let end = start + to.len() as u64;
        let blocks = start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        let mut at = blocks.start;
        while at < blocks.end {
            let part = part_of(at, start, to);
            if self
                .open(at, false)
                .is_some_and(|file| self.read(&file, at, part))
            {
                at += 1;
                continue;
            }
            let mut files = Vec::new();
            let deadline = Instant::now() + self.wait;
            for number in at..blocks.end.min(at + BLOCKS_AT_ONCE) {
                let file = self.lock(number, deadline);
                // Another process may have fetched it meanwhile.
                let part = part_of(number, start, to);
                if file
                    .as_ref()
                    .is_some_and(|file| self.read(&file.0, number, part))
                {
                    break;
                }
                files.push(file);
            }
            if files.is_empty() {
                at += 1;
                continue;
            }
            let first = at * BLOCK_BYTES;
            let n = (files.len() as u64 * BLOCK_BYTES).min(self.n_bytes - first);
            let mut bytes = vec![0; n as usize];
            fetch(first, &mut bytes)?;
            for (file, block) in files.iter().zip(bytes.chunks(BLOCK_BYTES as usize)) {
                let begin = start.max(at * BLOCK_BYTES);
                let stop = end.min(at * BLOCK_BYTES + block.len() as u64);
                let from = (begin - at * BLOCK_BYTES) as usize;
                let (here, len) = ((begin - start) as usize, (stop - begin) as usize);
                to[here..here + len].copy_from_slice(&block[from..from + len]);
                if let Some(file) = file {
                    self.write(&file.0, block);
                }
                at += 1;
            }
        }
        Ok(())
    }

    fn open(&self, number: u64, creates: bool) -> Option<File> {
        if creates {
            fs::create_dir_all(&self.folder).ok()?;
        }
        let path = self.folder.join(number.to_string());
        let mut options = OpenOptions::new();
        options.read(true).write(creates).create(creates);
        options.open(path).ok()
    }

    /// The file of a block, locked. None: it cannot be written, or another process holds the lock for too long.
    fn lock(&self, number: u64, deadline: Instant) -> Option<Locked> {
        let file = self.open(number, true)?;
        let mut pause = Duration::from_millis(1);
        loop {
            match file.try_lock() {
                Ok(()) => return Some(Locked(file)),
                Err(TryLockError::Error(_)) => return None,
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(pause),
                Err(TryLockError::WouldBlock) => break,
            }
            pause = LOOK_EVERY.min(pause * 2);
        }
        // Such as of a fork of a process that was killed. The next reader makes another file, and does not wait.
        remove_locked(&file, &self.folder.join(number.to_string()));
        None
    }

    fn block_bytes(&self, number: u64) -> u64 {
        BLOCK_BYTES.min(self.n_bytes - number * BLOCK_BYTES)
    }

    /// Reads a part of a block. Returns whether it is there and as it was written.
    fn read(&self, file: &File, number: u64, (begin, to): (u64, &mut [u8])) -> bool {
        self.read_checked(file, number, begin, to).unwrap_or(false)
    }

    fn read_checked(
        &self,
        file: &File,
        number: u64,
        begin: u64,
        to: &mut [u8],
    ) -> std::io::Result<bool> {
        let n_bytes = self.block_bytes(number);
        let n_chunks = n_bytes.div_ceil(CHUNK_BYTES as u64);
        let found = file.metadata()?;
        if found.len() != n_bytes + 4 * n_chunks {
            return Ok(false);
        }
        let mut sums = vec![0; 4 * n_chunks as usize];
        file.read_exact_at(&mut sums, n_bytes)?;
        let from = begin - number * BLOCK_BYTES;
        let end = from + to.len() as u64;
        let mut chunk = vec![0; CHUNK_BYTES.min(n_bytes as usize)];
        for at in from / CHUNK_BYTES as u64..end.div_ceil(CHUNK_BYTES as u64) {
            let first = at * CHUNK_BYTES as u64;
            let chunk = &mut chunk[..(n_bytes - first).min(CHUNK_BYTES as u64) as usize];
            file.read_exact_at(chunk, first)?;
            if crc32c(0, chunk).to_le_bytes() != sums[4 * at as usize..4 * at as usize + 4] {
                return Ok(false);
            }
            let (begin, stop) = (from.max(first), end.min(first + chunk.len() as u64));
            to[(begin - from) as usize..(stop - from) as usize]
                .copy_from_slice(&chunk[(begin - first) as usize..(stop - first) as usize]);
        }
        let is_old = found
            .modified()?
            .elapsed()
            .is_ok_and(|age| age > TOUCH_EVERY);
        if is_old {
            let _ = file.set_modified(SystemTime::now()); // one that is only read stays old
        }
        Ok(true)
    }

    /// Writes a block. One that cannot be written, such as on a full disk, is not kept.
    fn write(&self, file: &File, block: &[u8]) {
        let sums = block
            .chunks(CHUNK_BYTES)
            .flat_map(|chunk| crc32c(0, chunk).to_le_bytes());
        let sums: Vec<u8> = sums.collect();
        let written = file
            .set_len(0)
            .and_then(|()| file.write_all_at(block, 0))
            .and_then(|()| file.write_all_at(&sums, block.len() as u64));
        if written.is_err() {
            let _ = file.set_len(0);
        }
        let n = (block.len() + sums.len()) as u64;
        let limit = self.cache.max_bytes / SWEEP_PART;
        // Also after a sweep: what was written while it looked is not in its sum, and found its lock held.
        let written = written_into(&self.cache.folder);
        written.fetch_add(n, Ordering::SeqCst);
        while written.load(Ordering::SeqCst) > limit && sweep(&self.cache) {}
    }
}

/// The part of a buffer that begins at `start` which is in a block, and where it begins in the object.
fn part_of(number: u64, start: u64, to: &mut [u8]) -> (u64, &mut [u8]) {
    let end = start + to.len() as u64;
    let begin = start.max(number * BLOCK_BYTES);
    let stop = end.min((number + 1) * BLOCK_BYTES);
    (
        begin,
        &mut to[(begin - start) as usize..(stop - start) as usize],
    )
}

/// Removes the name of a file whose lock is not released, unless the name is that of another file by now.
fn remove_locked(file: &File, path: &Path) {
    if let (Ok(held), Ok(found)) = (file.metadata(), fs::metadata(path))
        && (held.dev(), held.ino()) == (found.dev(), found.ino())
    {
        let _ = fs::remove_file(path);
    }
}

/// How much was written into a folder. Its size is looked at with the first block.
fn written_into(folder: &Path) -> Arc<AtomicU64> {
    let mut all = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
    let count = all
        .entry(folder.to_owned())
        .or_insert_with(|| Arc::new(AtomicU64::new(u64::MAX / 2)));
    Arc::clone(count)
}

/// Removes what was not read for the longest time, until there is room for what is written before the next call. Returns
/// whether it did: one at a time does.
fn sweep(cache: &Cache) -> bool {
    let path = cache.folder.join(SWEEP_LOCK);
    let lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path);
    let Ok(lock) = lock else { return false };
    if lock.try_lock().is_err() {
        // Another process does, or a fork of one that was killed holds the lock: the next sweep makes another file.
        let begun = lock.metadata().and_then(|found| found.modified());
        if begun.is_ok_and(|begun| begun.elapsed().is_ok_and(|age| age > WAIT)) {
            remove_locked(&lock, &path);
        }
        return false;
    }
    let _ = lock.set_modified(SystemTime::now());
    let _lock = Locked(lock);
    written_into(&cache.folder).store(0, Ordering::SeqCst);
    let mut blocks = Vec::new();
    for folder in entries(&cache.folder) {
        for block in entries(&folder) {
            if let Ok(found) = block.metadata()
                && found.is_file()
                && is_block(&block)
            {
                let read_at = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                blocks.push((read_at, found.len(), block));
            }
        }
    }
    blocks.sort();
    let mut total: u64 = blocks.iter().map(|(_, n_bytes, _)| n_bytes).sum();
    let wanted = cache.max_bytes - cache.max_bytes / SWEEP_PART;
    for (_, n_bytes, block) in blocks {
        if total <= wanted {
            break;
        }
        if fs::remove_file(&block).is_ok() {
            total -= n_bytes;
            let _ = block.parent().map(fs::remove_dir); // if it is empty now
        }
    }
    true
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    found.map(|entry| entry.path()).collect()
}

/// Whether a file has the name of a block in the folder of a version: no other file is ever removed.
fn is_block(path: &Path) -> bool {
    let name = |path: &Path| path.file_name()?.to_str().map(str::to_owned);
    let is_number = |name: String| name.bytes().all(|byte| byte.is_ascii_digit());
    let is_version =
        |name: String| name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    name(path).is_some_and(is_number) && path.parent().and_then(name).is_some_and(is_version)
}

/// FNV-1a of 128 bits of several parts, as 32 hex digits.
fn name_of(parts: &[&[u8]]) -> String {
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for part in parts {
        for byte in part.len().to_le_bytes().iter().chain(part.iter()) {
            hash =
                (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
    format!("{hash:032x}")
}

/// Checks that a folder can be a cache, and makes it.
///
/// # Errors
/// [`Kind::Io`]: it cannot be made.
pub fn prepare(cache: &Cache) -> Result<()> {
    fs::create_dir_all(&cache.folder).map_err(|error| {
        Error::new(
            Kind::Io,
            format!("making the cache {}: {error}", cache.folder.display()),
        )
        .path(&cache.folder)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::env::temp_dir;
    use std::process;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::channel;

    const N_BYTES: u64 = 2 * BLOCK_BYTES + 1000;

    fn cached(wait: Duration) -> Cached {
        static NUMBERS: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let folder = temp_dir().join(format!("reshard-cache-{}-{number}", process::id()));
        let cache = Cache {
            folder,
            max_bytes: 1 << 30,
        };
        Cached {
            wait,
            ..Cached::new(&cache, "s3://bucket/a", "e", N_BYTES)
        }
    }

    /// What is at a position of the object.
    fn byte_at(at: u64) -> u8 {
        (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    #[expect(clippy::unnecessary_wraps, reason = "the type that `read_at` takes")]
    fn fetch(start: u64, to: &mut [u8]) -> Result<()> {
        for (byte, at) in to.iter_mut().zip(start..) {
            *byte = byte_at(at);
        }
        Ok(())
    }

    fn check(cached: &Cached, fetch: &dyn Fn(u64, &mut [u8]) -> Result<()>) {
        let mut found = vec![0; 1 << 20];
        let start = BLOCK_BYTES - 1000;
        cached.read_at(start, &mut found, fetch).unwrap();
        assert!(
            found
                .iter()
                .zip(start..)
                .all(|(byte, at)| *byte == byte_at(at))
        );
    }

    fn never(_: u64, _: &mut [u8]) -> Result<()> {
        panic!("it is in the cache")
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    #[test]
    fn a_lock_is_released_though_a_fork_has_the_file() {
        let cached = cached(WAIT);
        let failed = cached.read_at(0, &mut [0; 10], &|_, _| {
            Err(Error::new(Kind::Io, "the service failed"))
        });
        assert!(failed.is_err());
        let locked = cached.lock(1, soon()).unwrap();
        // A descriptor of the same opened file: that is what a fork has.
        let of_the_fork = locked.0.try_clone().unwrap();
        drop(locked);
        assert!(cached.lock(1, Instant::now()).is_some());
        check(&cached, &fetch);
        check(&cached, &never);
        drop(of_the_fork);
        fs::remove_dir_all(&cached.cache.folder).unwrap();
    }

    #[test]
    fn a_lock_that_is_never_released_is_waited_for_once() {
        let cached = cached(Duration::from_millis(50));
        // As of processes that were killed, with forks that go on.
        let locked: Vec<_> = (0..3).map(|number| cached.lock(number, soon())).collect();
        check(&cached, &fetch);
        check(&cached, &fetch);
        check(&cached, &never);
        drop(locked);
        check(&cached, &never);
        fs::remove_dir_all(&cached.cache.folder).unwrap();
    }

    #[test]
    fn a_fork_of_a_sweep_that_was_killed_stops_no_later_one() {
        let Cached { cache, folder, .. } = cached(WAIT);
        let cache = Cache {
            max_bytes: 0,
            ..cache
        };
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("0"), b"a block").unwrap();
        // The fork has the file open, and no process that sweeps will unlock it.
        let of_the_fork = File::create(cache.folder.join(SWEEP_LOCK)).unwrap();
        of_the_fork.lock().unwrap();
        sweep(&cache);
        sweep(&cache);
        assert!(folder.join("0").exists()); // it may be that of a process that sweeps
        of_the_fork
            .set_modified(SystemTime::now() - 2 * WAIT)
            .unwrap();
        sweep(&cache);
        sweep(&cache);
        assert!(!folder.exists());
        // One that sweeps tells since when.
        let lock = File::open(cache.folder.join(SWEEP_LOCK)).unwrap();
        assert!(
            lock.metadata()
                .unwrap()
                .modified()
                .unwrap()
                .elapsed()
                .unwrap()
                < WAIT
        );
        drop(of_the_fork);
        fs::remove_dir_all(&cache.folder).unwrap();
    }

    #[test]
    fn folders_beside_each_other_are_each_bounded() {
        let bounded = || {
            let Cached { cache, .. } = cached(WAIT);
            let max_bytes = 4 * BLOCK_BYTES;
            Cache { max_bytes, ..cache }
        };
        let caches = [bounded(), bounded()];
        for number in 0..16 {
            for cache in &caches {
                let one = Cached::new(cache, "s3://bucket/a", &number.to_string(), N_BYTES);
                one.read_at(0, &mut vec![0; N_BYTES as usize], &fetch)
                    .unwrap();
            }
        }
        for cache in caches {
            let blocks = entries(&cache.folder)
                .into_iter()
                .flat_map(|folder| entries(&folder));
            let n_bytes: u64 = blocks.map(|one| fs::metadata(one).unwrap().len()).sum();
            assert!(n_bytes <= cache.max_bytes + BLOCK_BYTES, "{n_bytes}");
            fs::remove_dir_all(cache.folder).unwrap();
        }
    }

    #[test]
    fn who_waits_finds_what_another_has_fetched() {
        let cached = cached(WAIT);
        let (begun, is_begun) = channel();
        thread::scope(|scope| {
            let (cached, begun) = (&cached, begun);
            scope.spawn(move || {
                check(cached, &|at, to| {
                    begun.send(()).unwrap();
                    thread::sleep(Duration::from_millis(100));
                    fetch(at, to)
                });
            });
            is_begun.recv().unwrap();
            check(cached, &never);
        });
        fs::remove_dir_all(&cached.cache.folder).unwrap();
    }
}
