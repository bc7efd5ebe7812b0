//! One object as a source of bytes: its size and its `ETag` are fixed when it is opened, and every request names the `ETag`.

use crate::address::{Address, Service};
use crate::cache::Cached;
use crate::client::{Client, runtime};
use crate::failure::{Doing, explain, is_beyond, replaced};
use crate::limit::answer_to;
use crate::options::cache_of;
use crate::service::ForObject;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, future};
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, GetResult, ObjectMeta};
use reshard_core::memory::Memory;
use reshard_core::source::{Link, Part, Ranges, Source, copy_to_parts, span_of};
use reshard_core::{Error, Kind, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The first bytes are fetched when an object is opened: most headers are in them.
const HEAD_BYTES: u64 = 64 << 10;
/// Smaller reads fetch a block of this size, and the last ones are kept: readers of archives and headers make many.
const BLOCK_BYTES: u64 = 64 << 10;
const N_BLOCKS: usize = 2;
/// The size of a request.
const REQUEST_BYTES: usize = 8 << 20;

static N_REQUESTS: AtomicU64 = AtomicU64::new(0);
static N_FAILED: AtomicU64 = AtomicU64::new(0);
static FETCHED_BYTES: AtomicU64 = AtomicU64::new(0);

pub use crate::pace::last_link;

/// Requests for objects of this process so far, those among them that failed for a passing reason, and the bytes of the
/// answers.
pub fn counts() -> (u64, u64, u64) {
    (
        N_REQUESTS.load(Ordering::Relaxed),
        N_FAILED.load(Ordering::Relaxed),
        FETCHED_BYTES.load(Ordering::Relaxed),
    )
}

pub(crate) fn count_request() {
    N_REQUESTS.fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn count_failed() {
    N_FAILED.fetch_add(1, Ordering::Relaxed);
}

fn count_bytes(n_bytes: usize) {
    FETCHED_BYTES.fetch_add(n_bytes as u64, Ordering::Relaxed);
}

/// An opened object.
#[derive(Debug)]
pub struct Object {
    address: Address,
    client: Arc<Client>,
    n_bytes: u64,
    version: Version,
    head: Bytes,
    blocks: Mutex<Vec<(u64, Bytes)>>,
    cached: Option<Cached>,
}

/// What all answers must have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Version {
    e_tag: Option<String>,
    /// Seconds since 1970; compared where the server has no `ETag`.
    modified: i64,
}

impl Version {
    fn of(meta: &ObjectMeta) -> Self {
        Self {
            e_tag: meta.e_tag.clone(),
            modified: meta.last_modified.timestamp(),
        }
    }

    /// An `ETag` that says that all bytes are the same. A weak one does not, and as a condition it never holds.
    fn strong(&self) -> Option<&str> {
        self.e_tag.as_deref().filter(|tag| !tag.starts_with("W/"))
    }
}

/// Opens an object by its URL, for the core.
///
/// # Errors
/// [`Kind::NotFound`]: there is none. [`Kind::Io`]: it cannot be read.
pub fn open(path: &Path) -> Result<Source> {
    let url = path
        .to_str()
        .ok_or_else(|| Error::new(Kind::Argument, "a URL is not valid Unicode"))?;
    let object = Object::open(&Address::parse(url)?)?;
    Ok(Source::of_ranges(
        PathBuf::from(object.address.shown()),
        object.n_bytes,
        Box::new(object),
    ))
}

/// The name of an object as `object_store` has it.
pub(crate) fn key_of(address: &Address) -> Result<Key> {
    Key::parse(&address.key).map_err(|_| {
        Error::new(Kind::Argument, format!("{address} is no name of an object"))
            .path(Path::new(&address.shown()))
    })
}

/// Options of a request for an object.
pub(crate) fn options() -> GetOptions {
    let mut options = GetOptions::default();
    options.extensions.insert(ForObject);
    options
}

impl Object {
    /// Opens an object.
    ///
    /// # Errors
    /// [`Kind::NotFound`]: there is none. [`Kind::Io`]: it cannot be read. [`Kind::Unsupported`]: the server cannot tell
    /// whether the object is replaced.
    pub fn open(address: &Address) -> Result<Self> {
        let client = Client::of(address)?;
        let failed = |error: &object_store::Error| explain(Doing::Opening, address, error);
        let key = key_of(address)?;
        let cache = cache_of(address);
        // The signature of a URL is often for GET alone.
        let is_look = cache.is_some() && address.service != Service::Http;
        let first = GetOptions {
            range: (!is_look).then_some(GetRange::Bounded(0..HEAD_BYTES)),
            head: is_look,
            ..options()
        };
        let begun = Instant::now();
        let fetched = runtime()?.block_on(async {
            match client.objects().get_opts(&key, first).await {
                Err(error) if is_beyond(&error) => {
                    // An empty object has no range.
                    let found = client.objects().get_opts(&key, options()).await?;
                    Ok((found.meta, Bytes::new()))
                }
                Ok(found) => {
                    client.pace().note_answer(begun.elapsed());
                    let meta = found.meta.clone();
                    let head = if is_look {
                        Bytes::new()
                    } else {
                        found.bytes().await?
                    };
                    Ok((meta, head))
                }
                Err(error) => Err(error),
            }
        });
        let (meta, head) = fetched.map_err(|error| failed(&error))?;
        count_bytes(head.len());
        let version = Version::of(&meta);
        if version.e_tag.is_none() && version.modified == 0 {
            let message = format!(
                "the server of {address} sends neither an ETag nor the time of the last change"
            );
            return Err(Error::new(Kind::Unsupported, message)
                .path(Path::new(&address.shown()))
                .hint("a replaced file could not be noticed: download it"));
        }
        let cached = cache
            .zip(version.strong())
            .map(|(cache, e_tag)| Cached::new(&cache, &address.shown(), e_tag, meta.size));
        Ok(Self {
            cached,
            address: address.clone(),
            n_bytes: meta.size,
            blocks: Mutex::default(),
            client,
            version,
            head,
        })
    }

    /// Its size.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// What identifies its version.
    pub fn e_tag(&self) -> Option<&str> {
        self.version.e_tag.as_deref()
    }

    /// When it was last changed, in seconds since 1970.
    pub fn modified(&self) -> i64 {
        self.version.modified
    }

    /// Fills a buffer from a position.
    ///
    /// # Errors
    /// [`Kind::Damaged`]: the object was replaced. [`Kind::Io`]: it cannot be read.
    pub fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
        let end = start + to.len() as u64;
        if end <= self.head.len() as u64 {
            to.copy_from_slice(&self.head[start as usize..end as usize]);
            return Ok(());
        }
        if end.div_ceil(BLOCK_BYTES) == start / BLOCK_BYTES + 1 && (to.len() as u64) < BLOCK_BYTES {
            let block = self.block(start / BLOCK_BYTES * BLOCK_BYTES)?;
            let from = (start % BLOCK_BYTES) as usize;
            to.copy_from_slice(&block[from..from + to.len()]);
            return Ok(());
        }
        self.read_range(start, to)
    }

    /// A range, from the cache or fetched.
    fn read_range(&self, start: u64, to: &mut [u8]) -> Result<()> {
        match &self.cached {
            Some(cached) => cached.read_at(start, to, &|at, part| self.fetch_range(at, part)),
            None => self.fetch_range(start, to),
        }
    }

    /// A range, by several requests at once.
    fn fetch_range(&self, start: u64, to: &mut [u8]) -> Result<()> {
        let client = self.client.here()?;
        let client = &*client;
        let parts = (start..)
            .step_by(REQUEST_BYTES)
            .zip(to.chunks_mut(REQUEST_BYTES));
        let fetches = parts
            .map(|(at, part)| async move { self.fetch_in_time(client, &mut [(at, part)]).await });
        runtime()?.block_on(future::try_join_all(fetches)).map(drop)
    }

    /// A range by one request, or by two if that takes too long.
    async fn fetch_in_time(&self, client: &Client, to: &mut [Part<'_>]) -> Result<()> {
        let fetch = async |to: &mut [Part<'_>]| self.fetch(client, to).await;
        client.pace().in_time(to, fetch).await
    }

    /// A block, from memory or fetched.
    fn block(&self, start: u64) -> Result<Bytes> {
        let lock = || self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, block)) = lock().iter().find(|(at, _)| *at == start) {
            return Ok(block.clone());
        }
        let mut block = vec![0; (self.n_bytes - start).min(BLOCK_BYTES) as usize];
        self.read_range(start, &mut block)?;
        let block = Bytes::from(block);
        let mut blocks = lock();
        if blocks.len() == N_BLOCKS {
            blocks.remove(0);
        }
        blocks.push((start, block.clone()));
        Ok(block)
    }

    /// One request. Bytes between the parts are dropped as they arrive.
    async fn fetch(&self, client: &Client, to: &mut [Part<'_>]) -> Result<()> {
        let failed = |error: object_store::Error| explain(Doing::Reading, &self.address, &error);
        let (start, end) = span_of(to);
        let options = GetOptions {
            range: Some(GetRange::Bounded(start..end)),
            if_match: self.version.strong().map(str::to_owned),
            ..options()
        };
        let key = key_of(&self.address)?;
        let begun = Instant::now();
        let found = client
            .objects()
            .get_opts(&key, options)
            .await
            .map_err(failed)?;
        self.check(&found)?;
        let answered = Instant::now();
        client.pace().note_answer(answered - begun);
        let mut frames = found.into_stream();
        let mut at = start;
        while let Some(frame) = frames.try_next().await.map_err(failed)? {
            count_bytes(frame.len());
            client.pace().note_bytes(frame.len());
            copy_to_parts(&frame, at, to);
            at += frame.len() as u64;
            if at > end {
                break;
            }
        }
        if at != end {
            return Err(self.wrong_length());
        }
        client.pace().note_rate(answered.elapsed(), end - start);
        Ok(())
    }

    /// Compares an answer with the object that was opened: a server may ignore the condition of a request.
    fn check(&self, found: &GetResult) -> Result<()> {
        let version = Version::of(&found.meta);
        let is_same = match (&version.e_tag, &self.version.e_tag) {
            (Some(now), Some(then)) => now == then,
            (None, None) => version == self.version,
            _ => false,
        };
        if is_same && found.meta.size == self.n_bytes {
            Ok(())
        } else {
            Err(replaced(&self.address))
        }
    }

    fn wrong_length(&self) -> Error {
        let message = format!(
            "reading {}: the answer has another length than the range",
            self.address
        );
        Error::new(Kind::Io, message)
            .path(Path::new(&self.address.shown()))
            .hint("try again")
    }
}

impl Ranges for Object {
    fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
        self.read_at(start, to)
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn read_parts(&self, parts: &mut [Part<'_>]) -> Result<()> {
        let (start, end) = span_of(parts);
        let n_bytes = (end - start) as usize;
        if end <= self.head.len() as u64 || n_bytes > REQUEST_BYTES {
            return parts
                .iter_mut()
                .try_for_each(|(start, part)| self.read_at(*start, part));
        }
        if self.cached.is_none() {
            let client = self.client.here()?;
            return runtime()?.block_on(self.fetch_in_time(&client, parts));
        }
        if let [(start, part)] = parts {
            return self.read_range(*start, part);
        }
        // Each block is read, and its sums are compared, once for all parts.
        let mut bytes = Memory::new(n_bytes)?;
        self.read_range(start, bytes.as_mut_slice())?;
        copy_to_parts(bytes.as_slice(), start, parts);
        Ok(())
    }

    fn link(&self) -> Link {
        // After a fork, the client of the parent measures nothing, and a thread of the parent may hold its locks.
        let here = self.client.here();
        here.map_or_else(|_| Link::default(), |client| client.pace().link())
    }
}

/// The complete content of an object, and its version; `None` if it is larger than `max_bytes`.
///
/// # Errors
/// As [`Object::open`].
pub fn read_small(address: &Address, max_bytes: u64) -> Result<Option<Vec<u8>>> {
    let client = Client::of(address)?;
    let key = key_of(address)?;
    let read = async {
        let found = client.objects().get_opts(&key, options()).await?;
        let n_bytes = found.meta.size;
        if n_bytes > max_bytes {
            return Ok(None);
        }
        let mut content = Vec::with_capacity(n_bytes as usize);
        let mut frames = found.into_stream();
        while let Some(frame) = frames.next().await {
            let frame = frame?;
            count_bytes(frame.len());
            content.extend_from_slice(&frame);
        }
        Ok(Some(content))
    };
    answer_to(read)?.map_err(|error| explain(Doing::Reading, address, &error))
}
