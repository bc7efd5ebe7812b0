//! Opens the description of a checkpoint: `metadata.json`, or its table.
//!
//! While a large table is decoded, a thread beside reads the headers of the first shard files: both take about as long,
//! and one waits for the disk.

use super::{Metadata, decode, decode_files, decode_table, index_of, index_of_table};
use reshard_core::error::{Error, Printable, Result};
use reshard_core::index::Index;
use reshard_core::shard_file::ReadHeader;
use reshard_core::source::{Method, Source};
use std::borrow::Cow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Limit of the size of a `metadata.json`. Checkpoints in practice have much smaller files.
const MAX_METADATA_BYTES: u64 = 4 << 30;

/// A smaller table is decoded in less time than a thread takes to start.
const MIN_BESIDE_BYTES: usize = 1 << 20;

/// The metadata of a `metadata.json`, and the index of the shard files beside it. `text` is its content, where it was read.
///
/// # Errors
/// The file cannot be read, or its content is damaged.
pub fn open(path: &Path, text: Option<&[u8]>, method: Method) -> Result<(Metadata, Index)> {
    let read = || {
        let text = text.map_or_else(
            || read_whole(path).map(Cow::Owned),
            |text| Ok(Cow::Borrowed(text)),
        );
        let metadata = decode(&text?).map_err(|error| error.within(path.display()))?;
        let index = index_of(&metadata, folder_of(path), method)?;
        Ok((metadata, index))
    };
    read().map_err(|error: Error| error.path(path))
}

/// The same of a table, which must be that of the `metadata.json` with this digest. With `read_headers`, the headers of
/// the first shard files are read meanwhile, if the table is large.
///
/// # Errors
/// The table is damaged, or of another `metadata.json`. A header that cannot be read is no error: it is read again when
/// its file is opened.
pub fn open_table(
    path: &Path,
    table: &[u8],
    digest: &str,
    method: Method,
    read_headers: bool,
) -> Result<(Metadata, Index)> {
    let folder = folder_of(path);
    let decode = || {
        let decoded = decode_table(table).map_err(|error| error.within(path.display()))?;
        if decoded.digest != digest {
            let message = format!(
                "{} describes a metadata.json with digest {}, expected {digest}",
                path.display(),
                Printable(&decoded.digest)
            );
            return Err(Error::damaged(message));
        }
        let index = index_of_table(&decoded, folder, method)?;
        Ok((decoded.metadata, index))
    };
    let opened = if read_headers && table.len() >= MIN_BESIDE_BYTES {
        let (decoded, headers) = beside(decode, |is_done| {
            read_some_headers(table, folder, method, is_done)
        });
        decoded.map(|(metadata, mut index)| {
            for (file, header) in (0..).zip(headers.unwrap_or_default()) {
                index.set_read_header(file, header);
            }
            (metadata, index)
        })
    } else {
        decode()
    };
    opened.map_err(|error| error.path(path))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

/// Runs `work`, and `other` beside it on a thread, with a flag that is set when `work` is done. `other` has no result if no
/// thread can be started.
fn beside<T, U: Send>(
    work: impl FnOnce() -> T,
    other: impl FnOnce(&AtomicBool) -> U + Send,
) -> (T, Option<U>) {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new();
        let started = thread.spawn_scoped(scope, || other(&is_done));
        let result = work();
        is_done.store(true, Ordering::Relaxed);
        (result, started.ok().and_then(|one| one.join().ok()))
    })
}

/// Reads the headers of the first files of a table, until the flag is set or one cannot be read. Its fault is found again
/// when the file is opened.
fn read_some_headers(
    table: &[u8],
    folder: &Path,
    method: Method,
    is_done: &AtomicBool,
) -> Vec<ReadHeader> {
    let read = |name: String| {
        let source = Source::open(&folder.join(name), false, method);
        source.and_then(ReadHeader::new).ok()
    };
    let names = decode_files(table).unwrap_or_default().into_iter();
    let names = names.take_while(|_| !is_done.load(Ordering::Relaxed));
    names.map_while(read).collect()
}

/// Reads a regular file of bounded size.
fn read_whole(path: &Path) -> Result<Vec<u8>> {
    let source = Source::open(path, false, Method::Read)?;
    let n_bytes = source.n_bytes();
    let mut text = Vec::new();
    if n_bytes > MAX_METADATA_BYTES || text.try_reserve_exact(n_bytes as usize).is_err() {
        let message =
            format!("the file has {n_bytes} bytes; at most {MAX_METADATA_BYTES} are allowed");
        return Err(Error::damaged(message));
    }
    text.resize(n_bytes as usize, 0);
    source.read_at(0, &mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::table::{MAGIC, Writer};
    use reshard_core::Kind;
    use reshard_core::dtype::Dtype;
    use reshard_core::header::build;
    use std::path::PathBuf;
    use std::time::Duration;

    /// A folder with three shard files, of which one is damaged, and the table of a `metadata.json` that names them.
    fn folder() -> (tempfile::TempDir, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let names = ["a.safetensors", "b.safetensors", "c.safetensors"];
        for (i, name) in names.iter().enumerate() {
            let (mut bytes, _) = build(&[(*name, Dtype::U8, &[4][..])], &[], 64).unwrap();
            bytes.extend([i as u8; 4]);
            if i == 1 {
                bytes[8] = b'?';
            }
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        let mut table = Writer(Vec::new());
        table.0.extend(MAGIC);
        table.text("digest").unwrap();
        table.texts(names.map(String::from).iter()).unwrap();
        (folder, table.0)
    }

    #[test]
    fn headers_are_read_up_to_the_first_fault() {
        let (folder, table) = folder();
        let is_done = AtomicBool::new(false);
        let read = |is_done: &AtomicBool| {
            read_some_headers(&table, folder.path(), Method::Read, is_done).len()
        };
        assert_eq!(read(&is_done), 1);
        is_done.store(true, Ordering::Relaxed);
        assert_eq!(read(&is_done), 0, "the table is decoded");
        let none = read_some_headers(b"no table", folder.path(), Method::Read, &is_done);
        assert_eq!(none.len(), 0);
    }

    #[test]
    fn other_work_learns_that_the_work_is_done() {
        let wait = |is_done: &AtomicBool| {
            while !is_done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            "other"
        };
        assert_eq!(beside(|| "work", wait), ("work", Some("other")));
    }

    #[test]
    fn an_error_names_the_file() {
        let path = PathBuf::from("missing/metadata.json");
        let error = open(&path, None, Method::Auto).unwrap_err();
        assert_eq!(error.kind(), Kind::NotFound);
        assert!(error.message().contains("missing/metadata.json"), "{error}");
        let error = open(&path, Some(b"{"), Method::Auto).unwrap_err();
        assert_eq!(error.kind(), Kind::Damaged);
        assert!(
            error.message().starts_with("missing/metadata.json: "),
            "{error}"
        );
        let error = open_table(&path, b"no table", "digest", Method::Auto, true).unwrap_err();
        assert_eq!(error.kind(), Kind::Damaged);
        assert!(
            error.message().starts_with("missing/metadata.json: "),
            "{error}"
        );
    }
}
