//! Objects that are written in parts, as the destination of a file: several parts at once, in bounded memory.
//!
//! A part is sent by the thread that brings its last bytes. So as many parts are sent at once as there are threads, and
//! in memory are those and one that is being filled. A part that fails is sent again; an upload that fails is ended, and
//! what was sent is removed by the service. An object of one part is written by one request.
//!
//! Several processes can send the parts of one object: one begins the upload, each sends parts with its ID, and one
//! completes it, with what the service has said of each part.

use crate::address::Address;
use crate::client::{Client, runtime};
use crate::failure::{Doing, explain, is_missing};
use crate::limit::answer_to;
use crate::object::{key_of, options};
use crate::service::ForObject;
use crate::write::check_writable;
use bytes::Bytes;
use futures_util::future::{Either, select};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as Key;
use object_store::{GetOptions, MultipartId, PutOptions, PutPayload};
use reshard_core::checksum::{CHUNK_BYTES, Checksums};
use reshard_core::control::Control;
use reshard_core::writer::ObjectSink;
use reshard_core::{Error, Kind, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The size of parts. Complete chunks and complete pieces of the writer.
const PART_BYTES: u64 = 16 << 20;
/// The size of parts of large objects, which would have too many.
const LARGE_PART_BYTES: u64 = 64 << 20;
const LARGE_BYTES: u64 = 150 << 30;
/// S3 takes so many parts, Google Cloud Storage too; Azure takes more.
const MAX_PARTS: u64 = 10_000;
/// A thread of the writer has memory for one piece.
const PIECE_BYTES: u64 = 4 << 20;
/// Parts of a local file that are sent at once.
const FILE_PARTS_AT_ONCE: u64 = 4;
/// How often it is asked whether the run was cancelled, while a request runs.
const TICK: Duration = Duration::from_millis(50);

/// The size of the parts of an object.
pub(crate) fn part_bytes(n_bytes: u64) -> u64 {
    if n_bytes <= LARGE_BYTES {
        PART_BYTES
    } else {
        LARGE_PART_BYTES
    }
}

/// How many threads may write an object, so that its parts and their pieces fit into memory; `None`: not even one.
fn n_at_once(part_bytes: u64, memory_bytes: u64) -> Option<usize> {
    let rest = memory_bytes.checked_sub(part_bytes)?;
    let n = rest / (part_bytes + PIECE_BYTES);
    (n > 0).then_some(n as usize)
}

/// An object that is being written.
#[derive(Debug)]
pub struct Upload<'a> {
    address: Address,
    key: Key,
    client: Arc<Client>,
    n_bytes: u64,
    part_bytes: u64,
    /// Of an upload in parts that was begun.
    id: Option<MultipartId>,
    state: Mutex<State>,
    control: &'a Control,
    /// Whether other processes send parts of the same upload: it is not completed, and not ended if it fails.
    is_shared: bool,
    is_done: bool,
}

#[derive(Debug, Default)]
struct State {
    /// The pieces of parts that are not complete, by the number of the part and the position.
    filling: BTreeMap<u64, BTreeMap<u64, Bytes>>,
    /// What the service says of the parts that it has.
    sent: BTreeMap<u64, PartId>,
    /// The pieces of an object of one part.
    whole: Vec<Bytes>,
}

/// Begins to write an object, for the core.
///
/// # Errors
/// [`Kind::Unsupported`]: it is behind HTTP, or larger than an object can be. [`Kind::Io`]: the service refused it.
pub fn begin<'a>(
    path: &Path,
    n_bytes: u64,
    control: &'a Control,
) -> Result<Box<dyn ObjectSink + 'a>> {
    let upload = Upload::begin(&address_of(path)?, n_bytes, control)?;
    Ok(Box::new(upload))
}

/// Opens an upload that another process has begun, for the core: parts are sent, and it is not completed.
///
/// # Errors
/// As [`begin`].
pub fn open<'a>(
    path: &Path,
    n_bytes: u64,
    id: &str,
    control: &'a Control,
) -> Result<Box<dyn ObjectSink + 'a>> {
    let upload = Upload::open(&address_of(path)?, n_bytes, id, control)?;
    Ok(Box::new(upload))
}

fn address_of(path: &Path) -> Result<Address> {
    let url = path
        .to_str()
        .ok_or_else(|| Error::new(Kind::Argument, "a URL is not valid Unicode"))?;
    Address::parse(url)
}

/// Begins an upload in parts, for several processes. Returns its ID; Azure has none, there it is empty.
///
/// # Errors
/// As [`begin`].
pub fn begin_shared(address: &Address) -> Result<String> {
    let control = Control::default();
    let upload = Upload::new(address, 0, &control)?;
    upload.run(upload.parts()?.create_multipart(&upload.key))
}

/// Makes an object of the parts that several processes have sent. Returns its `ETag`.
///
/// # Arguments
/// * `parts` - what the service has said of each part, in their order.
/// * `before` - the `ETag` of the object that had the name when the upload was begun. If the service says that there is
///   no such upload, as after a completion whose answer was lost, another `ETag` tells that it was completed.
///
/// # Errors
/// As [`begin`]. [`Kind::Io`] with the error number `ESTALE`: the service does not have the upload or these parts.
pub fn complete_shared(
    address: &Address,
    n_bytes: u64,
    id: &str,
    parts: Vec<String>,
    before: Option<&str>,
) -> Result<Option<String>> {
    let control = Control::default();
    let upload = Upload::open(address, n_bytes, id, &control)?;
    let n_parts = n_bytes.div_ceil(upload.part_bytes);
    if parts.len() as u64 != n_parts {
        let message = format!("{address} has {} parts, expected {n_parts}", parts.len());
        return Err(Error::new(Kind::Argument, message).path(Path::new(&address.shown())));
    }
    let parts = parts.into_iter().map(|content_id| PartId { content_id });
    upload.complete(&id.to_owned(), parts.collect(), before)
}

/// Ends an upload that is not to be completed; no error if there is none.
///
/// # Errors
/// As [`begin`].
pub fn end_shared(address: &Address, id: &str) -> Result<()> {
    let control = Control::default();
    let upload = Upload::new(address, 0, &control)?;
    let id = id.to_owned();
    let ended = upload.parts()?.abort_multipart(&upload.key, &id);
    match answer_to(ended)? {
        Err(error) if !is_missing(&error) => Err(upload.explain(&error)),
        _ => Ok(()),
    }
}

/// Writes an object with the content of a local file. Returns its `ETag`.
///
/// # Arguments
/// * `checksums` - those of its chunks; each is compared before it is sent.
///
/// # Errors
/// As [`begin`], or the file cannot be read. [`Kind::Damaged`]: it differs from its checksums.
pub fn send_file(
    path: &Path,
    address: &Address,
    checksums: Option<&Checksums>,
    control: &Control,
) -> Result<Option<String>> {
    let failed = |error: std::io::Error| Error::io("reading", path, &error);
    let file = File::open(path).map_err(failed)?;
    let n_bytes = file.metadata().map_err(failed)?.len();
    let changed =
        |what: String| Error::new(Kind::Damaged, format!("{}: {what}", path.display())).path(path);
    if let Some(expected) = checksums.map(Checksums::n_bytes)
        && expected != n_bytes
    {
        return Err(changed(format!(
            "it has {n_bytes} bytes, expected {expected}"
        )));
    }
    let upload = Box::new(Upload::begin(address, n_bytes, control)?);
    let part_bytes = upload.part_bytes;
    let n_parts = n_bytes.div_ceil(part_bytes);
    let next = AtomicU64::new(0);
    let send_part = |number: u64, piece: &mut [u8]| -> Result<()> {
        let mut at = number * part_bytes;
        let end = n_bytes.min(at + part_bytes);
        while at < end {
            let n = (end - at).min(PIECE_BYTES);
            let piece = &mut piece[..n as usize];
            file.read_exact_at(piece, at).map_err(failed)?;
            for (chunk, bytes) in (at / CHUNK_BYTES as u64..).zip(piece.chunks(CHUNK_BYTES)) {
                if checksums.is_some_and(|known| !known.matches(chunk as usize, bytes)) {
                    let begin = chunk * CHUNK_BYTES as u64;
                    let end = begin + bytes.len() as u64;
                    return Err(changed(format!("bytes {begin} to {end} were altered")));
                }
            }
            upload.write_at(at, piece)?;
            control.advance(n);
            at += n;
        }
        Ok(())
    };
    let work = || -> Result<()> {
        let mut piece = vec![0; n_bytes.min(PIECE_BYTES) as usize];
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= n_parts {
                return Ok(());
            }
            if let Err(error) = send_part(number, &mut piece) {
                next.store(n_parts, Ordering::Relaxed); // the others send no more
                return Err(error);
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..n_parts.min(FILE_PARTS_AT_ONCE))
            .map(|_| scope.spawn(work))
            .collect();
        let mut outcome = work();
        for thread in threads {
            let other = thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcome = outcome.and(other);
        }
        outcome
    })?;
    Ok(upload.publish()?.pop())
}

impl<'a> Upload<'a> {
    /// Begins to write an object of a size.
    ///
    /// # Errors
    /// As [`begin`].
    pub fn begin(address: &Address, n_bytes: u64, control: &'a Control) -> Result<Self> {
        let mut this = Self::new(address, n_bytes, control)?;
        if n_bytes > this.part_bytes {
            this.id = Some(this.run(this.parts()?.create_multipart(&this.key))?);
        }
        Ok(this)
    }

    /// Opens an upload with this ID of an object of a size.
    fn open(address: &Address, n_bytes: u64, id: &str, control: &'a Control) -> Result<Self> {
        let mut this = Self::new(address, n_bytes, control)?;
        this.id = Some(id.to_owned());
        this.is_shared = true;
        Ok(this)
    }

    fn new(address: &Address, n_bytes: u64, control: &'a Control) -> Result<Self> {
        check_writable(address)?;
        let part_bytes = part_bytes(n_bytes);
        if n_bytes > part_bytes * MAX_PARTS {
            let message = format!(
                "{address} would have {n_bytes} bytes, and an object has at most {}",
                part_bytes * MAX_PARTS
            );
            return Err(Error::new(Kind::Unsupported, message)
                .path(Path::new(&address.shown()))
                .hint("write smaller files (`max_shard_size`)"));
        }
        Ok(Self {
            address: address.clone(),
            key: key_of(address)?,
            client: Client::of(address)?,
            n_bytes,
            part_bytes,
            id: None,
            state: Mutex::default(),
            control,
            is_shared: false,
            is_done: false,
        })
    }

    fn parts(&self) -> Result<&dyn MultipartStore> {
        // `check_writable` has refused servers of files.
        let unsupported =
            || Error::new(Kind::Unsupported, "this service takes no parts of objects");
        self.client.parts().ok_or_else(unsupported)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn explain(&self, error: &object_store::Error) -> Error {
        explain(Doing::Writing, &self.address, error)
    }

    /// Runs a request, unless the run is cancelled.
    fn run<T>(&self, request: impl Future<Output = object_store::Result<T>>) -> Result<T> {
        let cancelled = async {
            while self.control.check().is_ok() {
                tokio::time::sleep(TICK).await;
            }
        };
        runtime()?.block_on(async {
            match select(pin!(request), pin!(cancelled)).await {
                Either::Left((done, _)) => done.map_err(|error| self.explain(&error)),
                Either::Right(_) => Err(self
                    .control
                    .check()
                    .err()
                    .unwrap_or_else(|| Error::new(Kind::Cancelled, "cancelled"))),
            }
        })
    }

    /// Size and `ETag` of the object that has the name now.
    fn look(&self) -> object_store::Result<Option<(u64, Option<String>)>> {
        let head = GetOptions {
            head: true,
            ..options()
        };
        let found = match runtime() {
            Ok(runtime) => runtime.block_on(self.client.objects().get_opts(&self.key, head)),
            Err(_) => return Ok(None),
        };
        match found {
            Ok(found) => Ok(Some((found.meta.size, found.meta.e_tag))),
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes bytes, which belong to one part; returns the part once it is complete.
    fn take(&self, start: u64, bytes: Bytes) -> Option<(u64, PutPayload)> {
        let number = start / self.part_bytes;
        let begin = number * self.part_bytes;
        let n_bytes = self.part_bytes.min(self.n_bytes - begin);
        let mut state = self.lock();
        let pieces = state.filling.entry(number).or_default();
        pieces.insert(start, bytes);
        let n_here: usize = pieces.values().map(Bytes::len).sum();
        if (n_here as u64) < n_bytes {
            return None;
        }
        let pieces = state.filling.remove(&number)?.into_values();
        if self.id.is_none() {
            state.whole = pieces.collect();
            return None;
        }
        Some((number, pieces.collect()))
    }

    /// Writes an object of one part.
    fn put(&self) -> Result<Option<String>> {
        let payload: PutPayload = std::mem::take(&mut self.lock().whole).into_iter().collect();
        let mut options = PutOptions::default();
        options.extensions.insert(ForObject);
        let sent = self.client.objects().put_opts(&self.key, payload, options);
        Ok(self.run(sent)?.e_tag)
    }

    /// Makes an object of the parts. If the service does not confirm it, the object itself tells whether it did so: it
    /// has the size, and another `ETag` than before.
    fn complete(
        &self,
        id: &MultipartId,
        parts: Vec<PartId>,
        before: Option<&str>,
    ) -> Result<Option<String>> {
        let done = self.run(self.parts()?.complete_multipart(&self.key, id, parts));
        self.control.check()?;
        let now = self.look().map_err(|error| self.explain(&error));
        match (done, now) {
            (Err(error), Ok(Some((n_bytes, e_tag)))) => {
                let is_ours = n_bytes == self.n_bytes
                    && e_tag.is_some()
                    && before.is_none_or(|before| Some(before) != e_tag.as_deref());
                if is_ours { Ok(e_tag) } else { Err(error) }
            }
            (Err(error), _) | (_, Err(error)) => Err(error),
            (Ok(_), Ok(Some((n_bytes, e_tag)))) if n_bytes == self.n_bytes => Ok(e_tag),
            (Ok(_), Ok(found)) => {
                let found = found.map_or("none".to_owned(), |(n_bytes, _)| n_bytes.to_string());
                let message = format!(
                    "writing {}: the service confirmed it, and the object has {found} bytes, expected {}",
                    self.address, self.n_bytes
                );
                Err(Error::new(Kind::Io, message)
                    .path(Path::new(&self.address.shown()))
                    .hint("another program writes the same object, or the service loses data: write again"))
            }
        }
    }
}

impl ObjectSink for Upload<'_> {
    fn n_at_once(&self, memory_bytes: u64) -> Result<usize> {
        if self.id.is_none() {
            return Ok(usize::MAX);
        }
        n_at_once(self.part_bytes, memory_bytes).ok_or_else(|| {
            let message = format!(
                "a memory budget of {memory_bytes} bytes is too small to write {} in parts of {}; expected at least {}",
                self.address,
                self.part_bytes,
                2 * self.part_bytes + PIECE_BYTES
            );
            Error::new(Kind::Argument, message)
        })
    }

    fn write_at(&self, start: u64, bytes: &[u8]) -> Result<()> {
        let mut at = start;
        let mut rest = bytes;
        while !rest.is_empty() {
            let n = (self.part_bytes - at % self.part_bytes).min(rest.len() as u64);
            let (here, after) = rest.split_at(n as usize);
            if let Some((number, payload)) = self.take(at, Bytes::copy_from_slice(here))
                && let Some(id) = &self.id
            {
                let sent = self
                    .parts()?
                    .put_part(&self.key, id, number as usize, payload);
                let part = self.run(sent)?;
                self.lock().sent.insert(number, part);
            }
            at += n;
            rest = after;
        }
        Ok(())
    }

    fn publish(mut self: Box<Self>) -> Result<Vec<String>> {
        let parts = std::mem::take(&mut self.lock().sent).into_values();
        let e_tag = match &self.id {
            None => self.put()?,
            Some(_) if self.is_shared => return Ok(parts.map(|one| one.content_id).collect()),
            Some(id) => {
                let before = self.look().map_err(|error| self.explain(&error))?;
                let before = before.map(|(_, e_tag)| e_tag.unwrap_or_default());
                self.complete(id, parts.collect(), before.as_deref())?
            }
        };
        self.is_done = true;
        Ok(e_tag.into_iter().collect())
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if self.is_done || self.is_shared {
            return;
        }
        // The caller gets the first error; what cannot be ended is removed by a rule of the bucket.
        if let (Some(id), Ok(parts), Ok(runtime)) = (&self.id, self.parts(), runtime()) {
            let ended = parts.abort_multipart(&self.key, id);
            let _ = runtime.block_on(async { tokio::time::timeout(ABORT_FOR, ended).await });
        }
    }
}

/// How long it is tried to end an upload that failed.
const ABORT_FOR: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_complete_pieces_and_not_too_many() {
        for n_bytes in [
            1,
            PART_BYTES,
            LARGE_BYTES,
            LARGE_BYTES + 1,
            LARGE_PART_BYTES * MAX_PARTS,
        ] {
            let size = part_bytes(n_bytes);
            assert!(n_bytes.div_ceil(size) <= MAX_PARTS, "{n_bytes}");
            assert_eq!(size % PIECE_BYTES, 0);
        }
    }

    #[test]
    fn parts_fit_into_the_memory() {
        for size in [PART_BYTES, LARGE_PART_BYTES] {
            let least = 2 * size + PIECE_BYTES;
            assert_eq!(n_at_once(size, least - 1), None);
            for memory in [least, 256 << 20, 1 << 30] {
                let n = n_at_once(size, memory).unwrap() as u64;
                assert!(n * (size + PIECE_BYTES) + size <= memory);
            }
        }
        assert!(n_at_once(PART_BYTES, 256 << 20).unwrap() >= 8);
    }
}
