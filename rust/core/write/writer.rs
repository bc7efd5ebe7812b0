//! Writes one shard file atomically: streamed, within a memory budget.
//!
//! The file is written in pieces of 4 MiB, up to eight at a time. Each writer thread has memory for one piece. It
//! claims the next piece, fills it from the sources of a plan, computes the checksums of its 256 KiB chunks while they
//! are in the cache, writes it, and claims the next one. The threads do not wait for each other. The checksums are
//! computed before the write, so they are those of the intended bytes. The bytes go to a temporary file in the same
//! folder, which is synced and then renamed: a file under its final name is complete.
//!
//! The first write to new memory makes the system provide its pages, which can take longer than filling them: 3 ms for
//! each 2 MiB where the host of a virtual machine must provide them too. One thread at a time does that. Meanwhile the
//! other processors fill and write the pieces whose memory exists.
//!
//! `O_DIRECT` gives the highest throughput of durable writes and does not fill the page cache. Writes are buffered
//! where the file system does not support it, and for a tail that is not a multiple of the block size. A file that need
//! not be durable takes the faster of both, see [`crate::write::route`].
//!
//! The file of a URL is an object, which is written through an [`ObjectSink`]: it takes pieces, too, and sends them in parts.
//!
//! A file of another format is given as a [`Container`]: the bytes between the arrays, and the places of their CRC-32.
//! A piece with such a sum is written when all pieces before it are filled: every byte is written once. Several processes
//! that write parts of a file leave the sums out; see [`write_sums`] and [`send_left`].

mod buffers;
mod content;
mod durable;
mod pieces;
mod sums;
mod temporary;

use crate::check::finite::{Finder, NotFinite};
use crate::check::verify::{verifies_files, verify_files};
use crate::control::Control;
use crate::error::{Error, Kind, Result};
use crate::files::checksum::{CHUNK_BYTES, Checksums, crc32c};
use crate::files::header::Header;
use crate::files::source::is_url;
use crate::planning::plan::{Array, Plan};
use crate::read::window::{Early, Window, has_remote};
use crate::write::route::Route;
use buffers::{Buffer, n_in_flight};
pub use buffers::{Buffers, MIN_MEMORY_BYTES};
pub use content::{Container, Sum};
pub(crate) use content::{Content, header_of};
pub use durable::{SyncResult, rename, sync_folder, sync_in_turn, sync_together};
use pieces::{Bytes, PieceWriter};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::OnceLock;
pub use sums::{SumOfPart, write_sums};
pub(crate) use temporary::{TemporaryFile, write_hint};

/// Alignment of direct writes that every disk accepts.
const DIRECT_BLOCK_BYTES: usize = 4096;
const PIECE_BYTES: usize = 4 << 20;
const BAND_BYTES: usize = 2 << 20;
/// Memory beside an image, for a sink that keeps parts of it.
const IMAGE_MEMORY_BYTES: u64 = 256 << 20;
/// The length field of a safetensors file, before the text of the header.
const LENGTH_BYTES: usize = 8;

/// How a file is written.
#[derive(Debug, Clone)]
pub struct Options {
    /// The header's `__metadata__`.
    pub metadata: Vec<(String, String)>,
    /// The container of the arrays; `None`: a safetensors file with `metadata`.
    pub container: Option<Container>,
    /// Sync the file and its folder before the call returns.
    pub durable: bool,
    /// Use `O_DIRECT` where the file system supports it.
    pub direct: bool,
    /// Permission bits, reduced by the umask.
    pub mode: u32,
}

/// The destination of a file of a known size. [`Self::publish`] makes the file visible. A sink that is dropped before
/// that is removed, and an older file with the same name is unchanged.
pub trait Sink: Sync + Sized {
    /// Writes bytes at a position. Several threads write disjoint ranges concurrently; every byte is written once.
    fn write_at(&self, start: u64, bytes: &[u8], route: Route) -> Result<()>;

    /// Whether bytes may take either route. Otherwise all take [`Route::Direct`].
    fn has_routes(&self) -> bool {
        false
    }

    /// Whether the places of the sums of arrays are not written: these are not known before all parts are there.
    fn leaves_sums(&self) -> bool {
        false
    }

    /// How many threads may write at once, so that what the sink keeps fits into memory, with a piece for each.
    ///
    /// # Errors
    /// [`Kind::Argument`]: the memory is too small.
    fn n_at_once(&self, _memory_bytes: u64) -> Result<usize> {
        Ok(usize::MAX)
    }

    /// Makes the file visible under its name. All bytes have been written. Returns what identifies its version, or the
    /// versions of the parts of an object; nothing for a local file.
    fn publish(self) -> Result<Vec<String>>;
}

/// The destination of an object, see [`Sink`].
pub trait ObjectSink: Sync {
    /// See [`Sink::write_at`].
    fn write_at(&self, start: u64, bytes: &[u8]) -> Result<()>;

    /// See [`Sink::n_at_once`].
    fn n_at_once(&self, memory_bytes: u64) -> Result<usize>;

    /// See [`Sink::publish`]: its `ETag`. Of parts, what the service says of each, in their order.
    fn publish(self: Box<Self>) -> Result<Vec<String>>;
}

impl Sink for Box<dyn ObjectSink + '_> {
    fn write_at(&self, start: u64, bytes: &[u8], _: Route) -> Result<()> {
        (**self).write_at(start, bytes)
    }

    fn n_at_once(&self, memory_bytes: u64) -> Result<usize> {
        (**self).n_at_once(memory_bytes)
    }

    fn publish(self) -> Result<Vec<String>> {
        self.publish()
    }
}

/// An object that is being written.
type OpenObject<'a> = Result<Box<dyn ObjectSink + 'a>>;

/// What writes objects outside the local file system.
#[derive(Debug, Clone, Copy)]
pub struct ObjectWriter {
    /// Begins to write an object of a size, by its URL.
    pub begin: for<'a> fn(&Path, u64, &'a Control) -> OpenObject<'a>,
    /// Opens an upload with an ID, into which other processes send parts, too. It publishes nothing.
    pub open_upload: for<'a> fn(&Path, u64, &str, &'a Control) -> OpenObject<'a>,
    /// The size of the parts of an object of a size.
    pub part_bytes: fn(u64) -> u64,
}

static OBJECT_WRITER: OnceLock<ObjectWriter> = OnceLock::new();

/// Sets what writes objects. The first call counts.
pub fn set_object_writer(writer: ObjectWriter) {
    OBJECT_WRITER.get_or_init(|| writer);
}

fn object_writer(path: &Path) -> Result<&'static ObjectWriter> {
    OBJECT_WRITER.get().ok_or_else(|| {
        let message = "this build of reshard writes local files only";
        Error::new(Kind::Unsupported, message)
            .path(path)
            .hint("install a wheel of reshard, or build it with the feature `remote`")
    })
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Its size and checksums.
    pub checksums: Checksums,
    /// Names of the arrays with values that are not finite, in the order of the file, and the worst value of each.
    pub not_finite: Vec<(String, NotFinite)>,
    /// The `ETag` of an object.
    pub e_tag: Option<String>,
}

impl Deref for Written {
    type Target = Checksums;

    fn deref(&self) -> &Checksums {
        &self.checksums
    }
}

/// Whether a file is small enough to be written by the calling thread without a pool. Such a file is one piece.
pub fn is_small(plan: &Plan<'_>, options: &Options) -> bool {
    are_small(plan.arrays(), options) && !verifies_files(plan)
}

/// Whether a file of some arrays is one piece.
pub(crate) fn are_small(arrays: &[Array], options: &Options) -> bool {
    const MAX_ARRAYS: usize = 256;
    const MAX_BYTES: usize = 1 << 20;
    // Header bytes of one array: a name, with up to six bytes per escaped character, and at most 32 extents.
    const { assert!(MAX_BYTES + MAX_ARRAYS * 7168 + (64 << 10) * 6 <= PIECE_BYTES) };
    let metadata = options.metadata.iter();
    let metadata_bytes: usize = metadata
        .map(|(key, value)| key.len() + value.len() + 8)
        .sum();
    let literals = options
        .container
        .as_ref()
        .map_or(0, |container| container.literals.len());
    let n_bytes: u64 = arrays.iter().map(Array::n_bytes).sum();
    n_bytes + literals as u64 <= MAX_BYTES as u64
        && arrays.len() <= MAX_ARRAYS
        && metadata_bytes <= 64 << 10
}

/// Writes the arrays of a plan into one shard file, in their order and under their names.
///
/// # Errors
/// A source cannot be read or is damaged, the file cannot be written, or the run was cancelled. The temporary file is
/// then removed, and an older file with the same name is unchanged.
pub fn write(
    path: &Path,
    plan: &Plan<'_>,
    options: &Options,
    buffers: &mut Buffers,
    control: &Control,
) -> Result<Written> {
    let content = Content::of_options(plan, options).map_err(|error| error.path(path))?;
    if is_url(path) {
        let writer = object_writer(path)?;
        let create = |n_bytes| (writer.begin)(path, n_bytes, control);
        return write_content(&content, create, buffers, control);
    }
    let create = |n_bytes| TemporaryFile::create(path, n_bytes, options);
    write_content(&content, create, buffers, control)
}

/// As [`write()`], to a sink that `create` makes for a size in bytes.
///
/// # Errors
/// As [`write()`]; the sink is dropped without being published.
pub fn write_to<S: Sink>(
    create: impl FnOnce(u64) -> Result<S>,
    plan: &Plan<'_>,
    metadata: &[(String, String)],
    buffers: &mut Buffers,
    control: &Control,
) -> Result<Written> {
    let content = Content::new(plan, metadata)?;
    write_content(&content, create, buffers, control)
}

/// A part of a file that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenPart {
    /// The part. It begins with a chunk; it can be empty.
    pub range: Range<u64>,
    /// Bytes of the file.
    pub n_bytes: u64,
    /// Bytes of its header.
    pub header_bytes: u64,
    /// The checksum of its header, or of its container: that of all parts is the same.
    pub header_checksum: u32,
    /// The checksums of the chunks of the part.
    pub chunks: Vec<u32>,
    /// See [`Written`]: of the values in the part.
    pub not_finite: Vec<(String, NotFinite)>,
    /// Of the arrays in the part, if the container has sums.
    pub sums: Vec<SumOfPart>,
    /// Of an object, what the service says of each part of the upload, in their order; empty: it is left to [`send_left`].
    pub sent: Vec<String>,
    /// Of an object, the number of the first part of the upload, from 0.
    pub first_sent: u64,
}

/// Writes a part of the file that [`write()`] writes, into a file that is there and that other processes fill at the same
/// time, or into an upload in parts. The parts of a file are given by positions in the bytes of its arrays; those that
/// follow each other there do so in the file. The sums of arrays are left out: [`write_sums`] writes them when all parts
/// are there. Of an object, what is left out are the parts of the upload with sums of arrays that begin in another part of
/// the file: [`send_left`] sends them.
///
/// # Arguments
/// `upload` - the ID of the upload of an object. A part begins with a part of the upload.
///
/// # Errors
/// As [`write()`]; what was written stays.
pub fn write_part(
    path: &Path,
    plan: &Plan<'_>,
    options: &Options,
    part: Range<u64>,
    upload: Option<&str>,
    buffers: &mut Buffers,
    control: &Control,
) -> Result<WrittenPart> {
    let content = Content::of_options(plan, options).map_err(|error| error.path(path))?;
    if part.start > part.end || is_url(path) != upload.is_some() {
        let message = "a local file is written in parts, or an upload of an object";
        return Err(Error::new(Kind::Argument, message).path(path));
    }
    let n_bytes = content.n_bytes();
    let (range, unit, written) = if let Some(id) = upload {
        let writer = object_writer(path)?;
        let unit = (writer.part_bytes)(n_bytes);
        // The nearest one, as these parts are large: so no process has two more than another.
        let near = |at| content.position(if at == 0 { 0 } else { at + unit / 2 }, unit);
        let range = near(part.start)..near(part.end);
        let left = content.units_without_sums(&range, unit);
        let create = |_| -> Result<_> {
            let sink = (writer.open_upload)(path, n_bytes, id, control)?;
            Ok(WithoutSome {
                sink,
                left: &left,
                unit,
            })
        };
        let mut written = write_range(&content, &range, create, buffers, control)?;
        let mut sent = written.identities.into_iter();
        let numbers = range.start.div_ceil(unit)..range.end.div_ceil(unit); // an empty one can be at the end
        let of_part = |number| (!left.contains(&number)).then(|| sent.next()).flatten();
        written.identities = numbers
            .map(of_part)
            .map(Option::unwrap_or_default)
            .collect();
        (range, unit, written)
    } else {
        let unit = CHUNK_BYTES as u64;
        let range = content.position(part.start, unit)..content.position(part.end, unit);
        let create = |_| temporary::FilePart::open(path, range.clone(), options);
        let written = write_range(&content, &range, create, buffers, control)?;
        (range, unit, written)
    };
    let mut sums = Vec::new();
    if !content.container.sums.is_empty() {
        let arrays = content.arrays_in(&range).into_iter();
        sums.extend(arrays.map(|(array, n_bytes)| (array, n_bytes, written.crcs[array])));
    }
    Ok(WrittenPart {
        n_bytes,
        first_sent: range.start / unit,
        sent: written.identities,
        header_bytes: content.header_bytes(),
        header_checksum: content.identity(),
        range,
        chunks: written.chunks,
        not_finite: written.not_finite,
        sums,
    })
}

/// What [`write_part`] has left out of an object.
#[derive(Debug, Clone)]
pub struct LeftParts<'a> {
    /// The ID of the upload.
    pub upload: &'a str,
    /// The numbers of the parts of the upload, from 0, in order.
    pub numbers: &'a [u64],
    /// What [`WrittenPart::sums`] says, of all parts in the order of the file.
    pub sums: &'a [SumOfPart],
}

/// Sends the parts of an upload that [`write_part`] has left out, as the sums of all arrays are known now. Returns what the
/// service says of each.
///
/// # Errors
/// As [`write_part`]; the sums are not those of all arrays.
pub fn send_left(
    path: &Path,
    plan: &Plan<'_>,
    container: &Container,
    left: &LeftParts<'_>,
    buffers: &mut Buffers,
    control: &Control,
) -> Result<Vec<String>> {
    let container =
        sums::with_sums(container, plan, left.sums).map_err(|error| error.path(path))?;
    let content = Content::of(plan, Cow::Owned(container), 0);
    let (writer, n_bytes) = (object_writer(path)?, content.n_bytes());
    let unit = (writer.part_bytes)(n_bytes);
    let mut sent = Vec::new();
    for number in left.numbers {
        let range = (number * unit).min(n_bytes)..((number + 1) * unit).min(n_bytes);
        let create = |_| (writer.open_upload)(path, n_bytes, left.upload, control);
        sent.extend(write_range(&content, &range, create, buffers, control)?.identities);
    }
    Ok(sent)
}

/// An upload of which some parts are not sent.
struct WithoutSome<'a, 'b> {
    sink: Box<dyn ObjectSink + 'a>,
    left: &'b BTreeSet<u64>,
    unit: u64,
}

impl Sink for WithoutSome<'_, '_> {
    fn write_at(&self, start: u64, bytes: &[u8], route: Route) -> Result<()> {
        if self.left.contains(&(start / self.unit)) {
            return Ok(()); // a piece lies in one part
        }
        self.sink.write_at(start, bytes, route)
    }

    fn n_at_once(&self, memory_bytes: u64) -> Result<usize> {
        self.sink.n_at_once(memory_bytes)
    }

    fn publish(self) -> Result<Vec<String>> {
        self.sink.publish()
    }
}

fn write_content<S: Sink>(
    content: &Content<'_>,
    create: impl FnOnce(u64) -> Result<S>,
    buffers: &mut Buffers,
    control: &Control,
) -> Result<Written> {
    let all = 0..content.n_bytes();
    let mut written = write_range(content, &all, create, buffers, control)?;
    Ok(Written {
        e_tag: written.identities.pop(),
        checksums: content.checksums(written.chunks)?,
        not_finite: written.not_finite,
    })
}

/// What was written of a file.
struct WrittenRange {
    /// The checksums of its chunks.
    chunks: Vec<u32>,
    /// The CRC-32 of what it has of each array, if the container has sums.
    crcs: Vec<u32>,
    not_finite: Vec<(String, NotFinite)>,
    /// See [`Sink::publish`].
    identities: Vec<String>,
}

fn write_range<S: Sink>(
    content: &Content<'_>,
    range: &Range<u64>,
    create: impl FnOnce(u64) -> Result<S>,
    buffers: &mut Buffers,
    control: &Control,
) -> Result<WrittenRange> {
    verify_files(content.plan, control)?;
    let n_bytes = range.end - range.start;
    let sink = create(n_bytes)?;
    let n_at_once = sink.n_at_once(buffers.memory_bytes())?;
    let (buffers, routes) = buffers.for_file(n_bytes, n_at_once)?;
    let routes = sink.has_routes().then_some(routes);
    let finder = finder_of(content.plan.arrays(), &content.container.starts);
    let bytes = Bytes::Planned(content);
    let write = |window: Option<&dyn Early>| {
        let range = range.clone();
        PieceWriter::new(&sink, bytes, range, routes, &finder, window, control).write(buffers)
    };
    let (chunks, crcs) = if has_remote(content.plan) {
        let (extents, rules) = content.extents(range);
        let window = Window::new(content.plan, &extents, rules, Vec::new());
        window.run(control, || write(Some(&window)))?
    } else {
        write(None)?
    };
    let identities = sink.publish()?;
    Ok(WrittenRange {
        chunks,
        crcs,
        not_finite: not_finite_of(content.plan.arrays(), &finder),
        identities,
    })
}

/// Writes the image of a file from page-aligned memory. See [`write()`].
///
/// # Errors
/// As [`write()`].
pub fn write_image(
    path: &Path,
    image: &[u8],
    header_bytes: u64,
    options: &Options,
    control: &Control,
) -> Result<Written> {
    let n_bytes = image.len() as u64;
    if is_url(path) {
        let sink = (object_writer(path)?.begin)(path, n_bytes, control)?;
        return write_image_to(sink, image, header_bytes, control);
    }
    let sink = TemporaryFile::create(path, n_bytes, options)?;
    write_image_to(sink, image, header_bytes, control)
}

fn write_image_to(
    sink: impl Sink,
    image: &[u8],
    header_bytes: u64,
    control: &Control,
) -> Result<Written> {
    let n_bytes = image.len() as u64;
    let (header_image, data) = image.split_at(header_bytes as usize);
    // The names are not kept with the image: to copy those of many arrays would take the time of the caller.
    let json = header_image.get(LENGTH_BYTES..).unwrap_or_default();
    let header = Header::parse(json.to_vec(), data.len() as u64)?;
    let entries = (0..header.len()).map(|i| header.entry(i));
    let finder =
        Finder::new(entries.map(|one| (one.dtype, header_bytes + one.start, one.end - one.start)));
    let bytes = Bytes::InMemory(image);
    let n_at_once = n_in_flight(n_bytes).min(sink.n_at_once(IMAGE_MEMORY_BYTES)?);
    let pieces = PieceWriter::new(&sink, bytes, 0..n_bytes, None, &finder, None, control);
    let (chunks, _) = pieces.write((0..n_at_once).map(|_| Buffer::default()).collect())?;
    let e_tag = sink.publish()?.pop();
    let found = finder.found().into_iter();
    Ok(Written {
        e_tag,
        checksums: Checksums::new(n_bytes, header_bytes, crc32c(0, header_image), chunks)?,
        not_finite: found
            .map(|(number, worst)| (header.entry(number).name.to_owned(), worst))
            .collect(),
    })
}

/// Finds values that are not finite in arrays that begin at these bytes of a file.
pub(crate) fn finder_of(arrays: &[Array], starts: &[u64]) -> Finder {
    let spans = arrays.iter().zip(starts);
    Finder::new(spans.map(|(array, start)| (array.dtype, *start, array.n_bytes())))
}

/// The names of the arrays that are not finite.
pub(crate) fn not_finite_of(arrays: &[Array], finder: &Finder) -> Vec<(String, NotFinite)> {
    let found = finder.found().into_iter();
    found
        .map(|(number, worst)| (arrays[number].name.clone(), worst))
        .collect()
}
