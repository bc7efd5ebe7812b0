//! The files of an index: opened when they are needed, with the sizes and checksums that are expected of them.

use super::Index;
use crate::error::{Error, Kind, Result};
use crate::files::checksum::Checksums;
use crate::files::listed::Listed;
use crate::files::shard_file::{Format, ReadHeader, ShardFile, data_bytes};
use crate::files::source::{LocalPath, Method, Source, Stamp, closed};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Reads the expected sizes and headers of files, and on request the checksums of their chunks.
#[derive(Clone)]
pub struct ReadChecksums(pub ReadsChecksums);

/// A function of the paths, and of whether the checksums of the chunks are needed.
type ReadsChecksums = Arc<dyn Fn(&[&Path], bool) -> Result<Vec<Checksums>> + Send + Sync>;

impl fmt::Debug for ReadChecksums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadChecksums")
    }
}

/// A file that changed while it was in use.
#[derive(Debug)]
pub struct Change<'a> {
    /// Its path.
    pub path: &'a Path,
    /// Its state when it was first opened.
    pub opened: Stamp,
    /// Its state now; `None`: there is no file at the path.
    pub now: Option<Stamp>,
}

/// Whether the folder of a file does not exist.
fn is_folder_gone(path: &Path) -> bool {
    let folder = path.parent();
    folder.is_some_and(|folder| !folder.as_os_str().is_empty() && !folder.exists())
}

/// A function that opens a file.
type Opener = Arc<dyn Fn() -> Result<Source> + Send + Sync>;

pub(super) struct FileSlot {
    /// As messages name it.
    pub(super) path: PathBuf,
    /// The same as an absolute path, of a local file.
    pub(super) place: PathBuf,
    pub(super) open: Opener,
    pub(super) format: Format,
    pub(super) checksums: OnceLock<Arc<Checksums>>,
    /// Whether `read_checksums` of the index is for this file: files that are added later have no checksums.
    pub(super) is_recorded: bool,
    /// The state of the file when it was first opened, also by an index of the same files.
    pub(super) stamp: Arc<OnceLock<Stamp>>,
    pub(super) opened: Mutex<Option<Arc<ShardFile>>>,
    pub(super) ahead: Mutex<Option<ReadHeader>>,
}

impl fmt::Debug for FileSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileSlot")
            .field("path", &self.path)
            .field("format", &self.format)
            .finish_non_exhaustive()
    }
}

impl FileSlot {
    /// Bytes of the data of a file of which nothing is recorded, from the length of its header; `None` if they are not
    /// known. The file counts as opened: a later change of it is noticed.
    pub(super) fn data_bytes(&self) -> Result<Option<u64>> {
        if self.is_recorded || !matches!(self.format, Format::Safetensors) {
            return Ok(None);
        }
        let source = (self.open)()?;
        if let Some(stamp) = source.stamp() {
            self.stamp.get_or_init(|| stamp);
        }
        data_bytes(&source)
    }

    /// Keeps a file that was opened.
    fn keep(&self, opened: &mut Option<Arc<ShardFile>>, file: ShardFile) -> Arc<ShardFile> {
        if let Some(stamp) = file.source().stamp() {
            self.stamp.get_or_init(|| stamp);
        }
        Arc::clone(opened.insert(Arc::new(file)))
    }

    /// The same file, not open.
    fn again(&self) -> Self {
        Self {
            path: self.path.clone(),
            place: self.place.clone(),
            open: Arc::clone(&self.open),
            format: self.format.clone(),
            checksums: self.checksums.clone(),
            is_recorded: self.is_recorded,
            stamp: Arc::clone(&self.stamp),
            opened: Mutex::new(None),
            ahead: Mutex::new(None),
        }
    }
}

impl Index {
    /// Adds a shard file and returns its number. The file is opened when it is needed.
    pub fn add_file(&mut self, path: PathBuf, follow_links: bool, method: Method) -> u32 {
        self.add_local(path, follow_links, method, Format::Safetensors)
    }

    /// Adds a local file of a format and returns its number. The file is opened when it is needed.
    pub fn add_local(
        &mut self,
        path: PathBuf,
        follow_links: bool,
        method: Method,
        format: Format,
    ) -> u32 {
        let local = LocalPath::of(&path);
        let place = local.place().to_owned();
        let open = move || local.open(follow_links, method);
        self.add_slot(path, place, format, Arc::new(open))
    }

    /// Adds a file that `open` opens when it is needed, and returns its number. `path` names it in messages.
    pub fn add_source(
        &mut self,
        path: PathBuf,
        format: Format,
        open: impl Fn() -> Result<Source> + Send + Sync + 'static,
    ) -> u32 {
        self.add_slot(path.clone(), path, format, Arc::new(open))
    }

    fn add_slot(&mut self, path: PathBuf, place: PathBuf, format: Format, open: Opener) -> u32 {
        self.files.push(FileSlot {
            path,
            place,
            open,
            format,
            checksums: OnceLock::new(),
            is_recorded: false,
            stamp: Arc::default(),
            opened: Mutex::new(None),
            ahead: Mutex::new(None),
        });
        self.files.len() as u32 - 1
    }

    /// An index of the same files without tensors: the files with these numbers become 0, 1, ... They are opened again.
    ///
    /// # Errors
    /// There is no such file.
    pub fn files_again(&self, numbers: &[u32]) -> Result<Self> {
        let mut index = Self::new();
        index.read_checksums.clone_from(&self.read_checksums);
        for &number in numbers {
            index.files.push(self.slot(number)?.again());
        }
        Ok(index)
    }

    /// Adds the files of another index, without its tensors; returns the number of the first. They are opened again.
    ///
    /// # Errors
    /// Checksums are recorded of a file: the function that reads them is for one index.
    pub fn add_files_of(&mut self, other: &Self) -> Result<u32> {
        if let Some(slot) = other.files.iter().find(|slot| slot.is_recorded) {
            let message = format!("{} has recorded checksums", slot.path.display());
            return Err(Error::new(Kind::Argument, message));
        }
        let first = self.files.len() as u32;
        self.files.extend(other.files.iter().map(FileSlot::again));
        Ok(first)
    }

    /// Sets the header of a safetensors file, which was read before its checksums are known. It is compared with them when
    /// the file is opened.
    pub fn set_read_header(&mut self, file: u32, ahead: ReadHeader) {
        if let Some(slot) = self.files.get_mut(file as usize) {
            slot.ahead = Mutex::new(Some(ahead));
        }
    }

    /// Sets the expected size and checksums of a file before it is opened.
    ///
    /// # Errors
    /// There is no such file, it is already open, or it is not a safetensors file.
    pub fn set_checksums(&mut self, file: u32, checksums: Checksums) -> Result<()> {
        let n_files = self.files.len();
        let slot = self.files.get_mut(file as usize).ok_or_else(|| {
            Error::new(
                Kind::Argument,
                format!("there is no file {file} among {n_files}"),
            )
        })?;
        let opened = slot.opened.get_mut();
        if opened.map_or(true, |opened| opened.is_some()) {
            let message = format!("{} is already open", slot.path.display());
            return Err(Error::new(Kind::Argument, message));
        }
        if !matches!(slot.format, Format::Safetensors) {
            let message = format!(
                "{} is not a safetensors file: checksums are not supported",
                slot.path.display()
            );
            return Err(Error::new(Kind::Argument, message));
        }
        slot.checksums = OnceLock::from(Arc::new(checksums));
        Ok(())
    }

    /// Sets what reads the sizes, headers and checksums of the safetensors files of the index for which
    /// [`Self::set_checksums`] was not called, when they are opened, and the checksums of chunks that it did not give,
    /// when a plan verifies them.
    pub fn set_checksums_reader(&mut self, read: ReadChecksums) {
        self.read_checksums = Some(read);
        for slot in &mut self.files {
            slot.is_recorded = matches!(slot.format, Format::Safetensors);
        }
    }

    /// Reads what is not known yet of files. Holds no lock: what reads may wait for another thread.
    pub(super) fn read_checksums(
        &self,
        files: impl IntoIterator<Item = u32>,
        with_chunks: bool,
    ) -> Result<()> {
        let mut missing = Vec::new();
        for file in files {
            let slot = self.slot(file)?;
            let is_known = match slot.checksums.get() {
                Some(checksums) => !with_chunks || checksums.has_chunks(),
                None => !slot.is_recorded,
            };
            if !is_known {
                missing.push(file);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        missing.sort_unstable();
        missing.dedup();
        let slots: Vec<&FileSlot> = missing.iter().map(|&i| &self.files[i as usize]).collect();
        let paths: Vec<&Path> = slots.iter().map(|slot| slot.path.as_path()).collect();
        let found = match &self.read_checksums {
            Some(read) => (read.0)(&paths, with_chunks)?,
            None => Vec::new(),
        };
        if found.len() != slots.len() {
            let message = format!("{} of {} checksums were read", found.len(), slots.len());
            return Err(Error::new(Kind::Argument, message));
        }
        for (slot, found) in slots.into_iter().zip(found) {
            let known = slot.checksums.get_or_init(|| Arc::new(found.clone()));
            if with_chunks && !known.has_chunks() {
                let completed = known.complete(found);
                completed.map_err(|error| error.within(slot.path.display()).path(&slot.path))?;
            }
        }
        Ok(())
    }

    /// Number of files.
    pub fn n_files(&self) -> usize {
        self.files.len()
    }

    /// Path of a file.
    pub fn file_path(&self, file: u32) -> Result<&Path> {
        Ok(&self.slot(file)?.path)
    }

    /// How a file tells what it holds.
    pub fn file_format(&self, file: u32) -> Result<&Format> {
        Ok(&self.slot(file)?.format)
    }

    pub(super) fn slot(&self, file: u32) -> Result<&FileSlot> {
        self.files
            .get(file as usize)
            .ok_or_else(|| Error::new(Kind::Argument, format!("there is no file {file}")))
    }

    /// Opens a file, or returns the opened file.
    pub fn open(&self, file: u32) -> Result<Arc<ShardFile>> {
        self.read_checksums([file], false)?;
        let slot = self.slot(file)?;
        let mut opened = lock(&slot.opened);
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        if let Some(opened) = &*opened {
            return Ok(Arc::clone(opened));
        }
        let checksums = slot.checksums.get().cloned();
        let ahead = lock(&slot.ahead).take();
        let shard_file = match ahead {
            Some(ahead) => ahead.open(checksums)?,
            None => ShardFile::open((slot.open)()?, &slot.format, checksums)?,
        };
        Ok(slot.keep(&mut opened, shard_file))
    }

    /// Opens a file that is no safetensors file with what makes its table and something else, which is returned. The
    /// format of the file would make the same table.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with<T>(
        &self,
        file: u32,
        read: impl FnOnce(&Source) -> Result<(Listed, T)>,
    ) -> Result<T> {
        let slot = self.slot(file)?;
        let mut opened = lock(&slot.opened);
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        let (shard_file, other) = ShardFile::read((slot.open)()?, read)?;
        slot.keep(&mut opened, shard_file);
        Ok(other)
    }

    /// The first file without checksums that is not what it was when it was first opened; `None` if there is none.
    ///
    /// A file is compared by the path, so that a file that got its name is a change. With its folder it may be removed:
    /// what was opened is read as it was. With `in_place`, only the opened file is examined, whatever the path names.
    ///
    /// # Errors
    /// The system cannot examine a file.
    pub fn changed_file(&self, in_place: bool) -> Result<Option<Change<'_>>> {
        for slot in &self.files {
            let Some(&opened) = slot.stamp.get() else {
                continue;
            };
            if slot.is_recorded || slot.checksums.get().is_some() {
                continue;
            }
            let of_path = if in_place {
                None
            } else {
                Stamp::of_path(&slot.place)?
            };
            let is_removed = !in_place && of_path.is_none() && !is_folder_gone(&slot.place);
            let now = match of_path {
                Some(now) => Some(now).filter(|now| *now != opened),
                None if is_removed => None,
                None => {
                    let file = lock(&slot.opened).clone();
                    let now = file.map_or(Ok(None), |file| file.source().stamp_now())?;
                    now.filter(|now| !now.has_same_content(&opened))
                }
            };
            if is_removed || now.is_some() {
                let path = &slot.path;
                return Ok(Some(Change { path, opened, now }));
            }
        }
        Ok(None)
    }

    /// Closes the files. Existing plans keep the files that they use.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        for slot in &self.files {
            *lock(&slot.opened) = None;
            *lock(&slot.ahead) = None;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
