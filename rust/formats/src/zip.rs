//! The members of a zip archive that stores them as they are: what `torch.save` writes.
//!
//! Sizes, checksums and positions come from the central directory, as `torch.save` leaves them out of the local headers.
//! Everything that two readers could understand differently is refused: members that overlap, names that occur twice or
//! differ between directory and member, a second end record, compression and encryption.
//!
//! Source of the format: APPNOTE.TXT of PKWARE, sections 4.3 to 4.5.

use reshard_core::error::Printable;
use reshard_core::source::Source;
use reshard_core::{Error, Kind, Result};
use std::borrow::Cow;
use std::collections::HashSet;

/// The signature of the record at the end of an archive.
pub const END: [u8; 4] = *b"PK\x05\x06";
const END_BYTES: u64 = 22;
const END64: u32 = 0x0606_4b50;
const END64_BYTES: u64 = 56;
const LOCATOR: u32 = 0x0706_4b50;
const LOCATOR_BYTES: u64 = 20;
const ENTRY: u32 = 0x0201_4b50;
const ENTRY_BYTES: usize = 46;
/// Where an entry of the directory has the CRC.
pub const CRC_AT: u64 = 16;
const LOCAL: u32 = 0x0403_4b50;
const LOCAL_BYTES: u64 = 30;
const MAX_COMMENT_BYTES: u64 = 0xffff;
/// Local headers that are read at once, if they lie in so many bytes.
const AHEAD_BYTES: u64 = 256 << 10;
/// The bytes between two of them, which are read with them: a page.
const MAX_GAP_BYTES: u64 = 4 << 10;
/// A directory of a million members takes about this.
const MAX_DIRECTORY_BYTES: u64 = 256 << 20;

/// A range of a file, read as if it were a file of its own.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    source: &'a Source,
    start: u64,
    n_bytes: u64,
    parts: &'a [Part],
}

/// Bytes of a file that were read before.
#[derive(Debug, Default)]
pub struct Part {
    /// Where they begin in the file.
    pub start: u64,
    /// They.
    pub bytes: Vec<u8>,
}

/// A file of at most so many bytes is read at once: else it takes a small read for each of its members.
const MAX_SMALL_BYTES: u64 = 4 << 20;

impl Part {
    /// All of a small file, or nothing of a larger one.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of_small(source: &Source) -> Result<Self> {
        let mut part = Self::default();
        if source.n_bytes() <= MAX_SMALL_BYTES {
            part.bytes.resize(source.n_bytes() as usize, 0);
            source.read_at(0, &mut part.bytes)?;
        }
        Ok(part)
    }

    /// The bytes of a range of the file, if all of them are here.
    pub fn range(&self, start: u64, n_bytes: u64) -> Option<&[u8]> {
        let from = usize::try_from(start.checked_sub(self.start)?).ok()?;
        self.bytes
            .get(from..)?
            .get(..usize::try_from(n_bytes).ok()?)
    }
}

/// A member that is stored as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub name: String,
    /// Where its bytes begin in the file.
    pub start: u64,
    /// How many there are.
    pub n_bytes: u64,
    /// CRC-32 of them; 0 where the writer computed none.
    pub crc: u32,
    /// Where its local header begins in the file.
    pub header: u64,
    /// Where the directory has its CRC.
    pub crc_at: u64,
}

impl<'a> Window<'a> {
    /// A range of a file.
    ///
    /// # Errors
    /// It does not lie in the file.
    pub fn new(source: &'a Source, start: u64, n_bytes: u64) -> Result<Self> {
        let end = start
            .checked_add(n_bytes)
            .filter(|end| *end <= source.n_bytes());
        if end.is_none() {
            let message = format!(
                "bytes {start} to {} lie beyond its end at {}",
                start.saturating_add(n_bytes),
                source.n_bytes()
            );
            return Err(Error::damaged(message));
        }
        Ok(Self {
            source,
            start,
            n_bytes,
            parts: &[],
        })
    }

    /// The same, of which these parts of the file were read before.
    #[must_use]
    pub fn with(self, parts: &'a [Part]) -> Self {
        Self { parts, ..self }
    }

    /// The whole file.
    pub fn whole(source: &'a Source) -> Self {
        Self {
            source,
            start: 0,
            n_bytes: source.n_bytes(),
            parts: &[],
        }
    }

    /// Size in bytes.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Where the range begins in the file.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Bytes from a position of the range.
    pub fn read(&self, at: u64, n_bytes: u64) -> Result<Cow<'a, [u8]>> {
        if at.checked_add(n_bytes).is_none_or(|end| end > self.n_bytes) {
            return Err(Error::damaged("it ends in the middle of a record"));
        }
        let mut parts = self.parts.iter();
        if let Some(bytes) = parts.find_map(|part| part.range(self.start + at, n_bytes)) {
            return Ok(Cow::Borrowed(bytes));
        }
        let mut bytes = vec![0; n_bytes as usize];
        self.source.read_at(self.start + at, &mut bytes)?;
        Ok(Cow::Owned(bytes))
    }
}

/// The members of an archive, sorted by position.
///
/// # Errors
/// `Kind::Damaged` if it is no such archive, `Kind::Unsupported` for compressed or encrypted members.
pub fn members(window: Window<'_>) -> Result<Vec<Member>> {
    let directory = directory(window)?;
    let bytes = window.read(directory.start, directory.n_bytes)?;
    let mut entries = Vec::new();
    let mut names = HashSet::new();
    let mut rest = &*bytes;
    while !rest.is_empty() {
        let crc_at = directory.start + (bytes.len() - rest.len()) as u64 + CRC_AT;
        let (entry, n) = entry(rest, crc_at)?;
        rest = &rest[n..];
        if !names.insert(entry.name) {
            return Err(Error::damaged(format!(
                "member `{}` occurs twice",
                Printable(entry.name)
            )));
        }
        entries.push(entry);
        if entries.len() as u64 > directory.n_members {
            break;
        }
    }
    if entries.len() as u64 != directory.n_members {
        let message = format!(
            "the directory has not the {} members that the end record counts",
            directory.n_members
        );
        return Err(Error::damaged(message));
    }
    entries.sort_by_key(|entry| entry.header);
    let (mut members, mut used) = (Vec::with_capacity(entries.len()), Vec::new());
    let mut ahead = [Part::default()];
    for (i, entry) in entries.iter().enumerate() {
        read_ahead(window, &entries[i..], directory.start, &mut ahead[0])?;
        let read = if ahead[0].bytes.is_empty() {
            window
        } else {
            window.with(&ahead)
        };
        let (member, range) = locate(read, entry, directory.start)?;
        used.push(range);
        members.push(member);
    }
    used.sort_unstable();
    if used.windows(2).any(|pair| pair[0].1 > pair[1].0) {
        return Err(Error::damaged("two members of the archive overlap"));
    }
    members.sort_by_key(|member| member.start);
    Ok(members)
}

/// Reads the local header of the first of these members, which are sorted by it, and those that follow close to each
/// other, unless it was read with those before it. Of a window with parts nothing is read: they are what was read ahead.
fn read_ahead(
    window: Window<'_>,
    entries: &[Entry<'_>],
    directory: u64,
    part: &mut Part,
) -> Result<()> {
    let [first, others @ ..] = entries else {
        return Ok(());
    };
    let start = first.header;
    let n_first = first.header_end().saturating_sub(start);
    if window.parts.iter().any(|part| !part.bytes.is_empty())
        || part.range(window.start() + start, n_first).is_some()
    {
        return Ok(());
    }
    let mut end = first.header_end();
    for next in others {
        let next_end = next.header_end();
        if next.header > end.saturating_add(MAX_GAP_BYTES) || next_end - start > AHEAD_BYTES {
            break;
        }
        end = end.max(next_end);
    }
    // One that lies elsewhere is refused when it is looked at.
    let end = end.min(directory);
    if start < end {
        part.bytes = window.read(start, end - start)?.into_owned();
        part.start = window.start() + start;
    }
    Ok(())
}

struct Directory {
    start: u64,
    n_bytes: u64,
    n_members: u64,
}

/// Finds the central directory from the end of the archive.
fn directory(window: Window<'_>) -> Result<Directory> {
    let n = window.n_bytes();
    if n < END_BYTES {
        return Err(Error::damaged("it is too short for a zip archive"));
    }
    let tail_bytes = n.min(END_BYTES + MAX_COMMENT_BYTES);
    let tail_at = n - tail_bytes;
    let tail = window.read(tail_at, tail_bytes)?;
    let is_end = |at: &usize| {
        let rest = &tail[*at..];
        rest.starts_with(&END) && rest.len() as u64 == END_BYTES + u64::from(u16_at(rest, 20))
    };
    let mut ends = (0..=tail.len() - END_BYTES as usize).filter(is_end);
    let at = ends.next().ok_or_else(|| {
        Error::damaged("there is no end record of a zip archive: the file is cut short")
    })?;
    if ends.next().is_some() {
        return Err(Error::damaged("there are two end records of a zip archive"));
    }
    let end = &tail[at..];
    let end_at = tail_at + at as u64;
    if u16_at(end, 4) != 0 && u16_at(end, 4) != 0xffff {
        return Err(Error::new(
            Kind::Unsupported,
            "it is one part of an archive of several",
        ));
    }
    let mut directory = Directory {
        start: u64::from(u32_at(end, 16)),
        n_bytes: u64::from(u32_at(end, 12)),
        n_members: u64::from(u16_at(end, 10)),
    };
    let mut directory_end = end_at;
    let has_locator =
        end_at >= LOCATOR_BYTES && u32_at(&window.read(end_at - LOCATOR_BYTES, 4)?, 0) == LOCATOR;
    let needs_end64 = directory.n_members == 0xffff
        || directory.start == 0xffff_ffff
        || directory.n_bytes == 0xffff_ffff;
    if has_locator {
        let locator = window.read(end_at - LOCATOR_BYTES, LOCATOR_BYTES)?;
        let end64_at = u64_at(&locator, 8);
        let is_before = end64_at
            .checked_add(END64_BYTES)
            .is_some_and(|end| end <= end_at - LOCATOR_BYTES);
        if !is_before {
            return Err(Error::damaged(
                "the zip64 end record lies outside the archive",
            ));
        }
        let end64 = window.read(end64_at, END64_BYTES)?;
        if u32_at(&end64, 0) != END64
            || u64_at(&end64, 4).checked_add(12) != Some(end_at - LOCATOR_BYTES - end64_at)
        {
            return Err(Error::damaged(
                "there is no zip64 end record where the archive says",
            ));
        }
        let wide = Directory {
            start: u64_at(&end64, 48),
            n_bytes: u64_at(&end64, 40),
            n_members: u64_at(&end64, 32),
        };
        let agrees = |narrow: u64, wide: u64, most: u64| narrow == most || narrow == wide;
        if !agrees(directory.start, wide.start, 0xffff_ffff)
            || !agrees(directory.n_bytes, wide.n_bytes, 0xffff_ffff)
            || !agrees(directory.n_members, wide.n_members, 0xffff)
        {
            return Err(Error::damaged("the two end records of the archive differ"));
        }
        directory = wide;
        directory_end = end64_at;
    } else if needs_end64 {
        return Err(Error::damaged("the zip64 end record is missing"));
    }
    if directory.start.checked_add(directory.n_bytes) != Some(directory_end) {
        return Err(Error::damaged(
            "the directory of the archive is not where the end record says",
        ));
    }
    if directory.n_bytes > MAX_DIRECTORY_BYTES {
        let message = format!(
            "a directory of {} bytes, at most {MAX_DIRECTORY_BYTES} are read",
            directory.n_bytes
        );
        return Err(Error::new(Kind::Unsupported, message));
    }
    Ok(directory)
}

struct Entry<'a> {
    name: &'a str,
    header: u64,
    n_bytes: u64,
    crc: u32,
    /// Where the directory has its CRC.
    crc_at: u64,
}

impl Entry<'_> {
    /// The end of its local header up to its name.
    fn header_end(&self) -> u64 {
        self.header
            .saturating_add(LOCAL_BYTES + self.name.len() as u64)
    }
}

/// The first entry of a directory, and its length there.
fn entry(bytes: &[u8], crc_at: u64) -> Result<(Entry<'_>, usize)> {
    if bytes.len() < ENTRY_BYTES || u32_at(bytes, 0) != ENTRY {
        return Err(Error::damaged("the directory of the archive is damaged"));
    }
    let n_name = usize::from(u16_at(bytes, 28));
    let n_extra = usize::from(u16_at(bytes, 30));
    let n = ENTRY_BYTES + n_name + n_extra + usize::from(u16_at(bytes, 32));
    if bytes.len() < n {
        return Err(Error::damaged("the directory of the archive is cut short"));
    }
    let name = std::str::from_utf8(&bytes[ENTRY_BYTES..ENTRY_BYTES + n_name])
        .map_err(|_| Error::damaged("a member has a name that is not valid UTF-8"))?;
    let unsupported = |what: &str| {
        Err(Error::new(
            Kind::Unsupported,
            format!("member `{}` is {what}", Printable(name)),
        ))
    };
    if u16_at(bytes, 8) & 1 != 0 {
        return unsupported("encrypted");
    }
    match u16_at(bytes, 10) {
        0 => {}
        8 => return unsupported("compressed, which `torch.save` never does"),
        method => return unsupported(&format!("compressed by method {method}")),
    }
    let mut wide = Extra64::new(&bytes[ENTRY_BYTES + n_name..ENTRY_BYTES + n_name + n_extra]);
    let n_bytes = wide.or(u32_at(bytes, 24))?;
    let n_stored = wide.or(u32_at(bytes, 20))?;
    let header = wide.or(u32_at(bytes, 42))?;
    if n_bytes != n_stored {
        return Err(Error::damaged(format!(
            "member `{}` is stored as it is, but with two sizes",
            Printable(name)
        )));
    }
    Ok((
        Entry {
            name,
            header,
            n_bytes,
            crc: u32_at(bytes, CRC_AT as usize),
            crc_at,
        },
        n,
    ))
}

/// The wide fields of an entry, which stand in the order of the narrow ones that they replace.
struct Extra64<'a>(&'a [u8]);

impl<'a> Extra64<'a> {
    fn new(mut extra: &'a [u8]) -> Self {
        while extra.len() >= 4 {
            let (tag, n) = (u16_at(extra, 0), usize::from(u16_at(extra, 2)));
            let Some(content) = extra.get(4..4 + n) else {
                break;
            };
            if tag == 1 {
                return Self(content);
            }
            extra = &extra[4 + n..];
        }
        Self(&[])
    }

    fn or(&mut self, narrow: u32) -> Result<u64> {
        if narrow != u32::MAX {
            return Ok(u64::from(narrow));
        }
        let Some((value, rest)) = self.0.split_at_checked(8) else {
            return Err(Error::damaged("a member lacks its zip64 sizes"));
        };
        self.0 = rest;
        Ok(u64_at(value, 0))
    }
}

/// Where a member lies: its bytes, and the range with its local header.
fn locate(window: Window<'_>, entry: &Entry<'_>, directory: u64) -> Result<(Member, (u64, u64))> {
    let bad = |what: &str| Error::damaged(format!("member `{}` {what}", Printable(entry.name)));
    if entry
        .header
        .checked_add(LOCAL_BYTES)
        .is_none_or(|end| end > directory)
    {
        return Err(bad("lies outside the archive"));
    }
    // The header and the name behind it in one read: there is one for each tensor.
    let n_listed = entry.name.len() as u64;
    let n_read = (LOCAL_BYTES + n_listed).min(directory - entry.header);
    let header = window.read(entry.header, n_read)?;
    if u32_at(&header, 0) != LOCAL {
        return Err(bad("has no header where the directory says"));
    }
    let n_name = u64::from(u16_at(&header, 26));
    let n_extra = u64::from(u16_at(&header, 28));
    let start = entry.header + LOCAL_BYTES + n_name + n_extra;
    let end = start
        .checked_add(entry.n_bytes)
        .filter(|end| *end <= directory);
    let end = end.ok_or_else(|| bad("ends outside the archive"))?;
    if n_name != n_listed || header[LOCAL_BYTES as usize..] != *entry.name.as_bytes() {
        return Err(bad("has another name in its header"));
    }
    let range = (entry.header, end);
    Ok((
        Member {
            start: window.start() + start,
            name: entry.name.to_owned(),
            n_bytes: entry.n_bytes,
            crc: entry.crc,
            header: window.start() + entry.header,
            crc_at: window.start() + entry.crc_at,
        },
        range,
    ))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use reshard_core::source::Ranges;
    use std::path::PathBuf;
    use std::sync::{Arc, Mutex};

    /// Bytes, and the ranges of them that were read.
    #[derive(Debug)]
    struct Counted(Vec<u8>, Arc<Mutex<Vec<(u64, usize)>>>);

    impl Ranges for Counted {
        fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
            let mut reads = self.1.lock().map_err(|_| Error::damaged("a failure"))?;
            reads.push((start, to.len()));
            to.copy_from_slice(&self.0[start as usize..][..to.len()]);
            Ok(())
        }
    }

    /// An archive of members `a`, `b`, ... of these sizes, and where each begins.
    fn archive(sizes: &[usize]) -> (Vec<u8>, Vec<u64>) {
        let (mut bytes, mut directory, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for (name, &size) in (b'a'..).zip(sizes) {
            let header = bytes.len() as u32;
            bytes.extend(LOCAL.to_le_bytes());
            bytes.extend([0; 22]);
            bytes.extend([1, 0, 0, 0, name]);
            starts.push(bytes.len() as u64);
            bytes.resize(bytes.len() + size, 0);
            directory.extend(ENTRY.to_le_bytes());
            directory.extend([0; 16]);
            directory.extend((size as u32).to_le_bytes());
            directory.extend((size as u32).to_le_bytes());
            directory.extend([1, 0]);
            directory.extend([0; 12]);
            directory.extend(header.to_le_bytes());
            directory.push(name);
        }
        let end = [bytes.len() as u32, directory.len() as u32];
        bytes.extend(&directory);
        bytes.extend(END);
        bytes.extend([0; 4]);
        bytes.extend([sizes.len() as u8, 0, sizes.len() as u8, 0]);
        bytes.extend(end[1].to_le_bytes());
        bytes.extend(end[0].to_le_bytes());
        bytes.extend([0; 2]);
        (bytes, starts)
    }

    #[test]
    fn headers_that_lie_close_together_are_read_at_once() {
        let page = MAX_GAP_BYTES as usize;
        let (bytes, starts) = archive(&[10, page, page + 1, 0, 100_000, 7]);
        let reads = Arc::new(Mutex::new(Vec::new()));
        let counted = Counted(bytes, Arc::clone(&reads));
        let n_bytes = counted.0.len() as u64;
        let source = Source::of_ranges(PathBuf::from("some"), n_bytes, Box::new(counted));
        let found = members(Window::whole(&source)).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|one| (one.name.as_str(), one.start))
            .collect();
        let names = ["a", "b", "c", "d", "e", "f"];
        assert_eq!(
            found,
            names
                .into_iter()
                .zip(starts.iter().copied())
                .collect::<Vec<_>>()
        );
        let header = LOCAL_BYTES + 1;
        let of_headers = [
            (0, (starts[2]) as usize),
            (starts[3] - header, (2 * header) as usize),
            (starts[5] - header, header as usize),
        ];
        let reads = reads.lock().unwrap();
        assert_eq!(reads[reads.len() - 3..], of_headers, "{reads:?}");
    }
}
