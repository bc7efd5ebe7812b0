//! Files that differ only in what their tensors hold, as many files of the ranks of a save.
//!
//! The names of the members of an archive begin with the name of the file, so that no two files are equal byte by byte.
//! Files with the same pickle, and with storages of the same keys and sizes, are decoded to the same values.

use super::{Archive, Leaf, TorchFile, is_zip, unpacked};
use crate::zip::{Part, Window};
use reshard_core::source::{Method, Source};
use reshard_core::{Error, Result};
use std::path::Path;

/// Files with which others are compared.
const MAX_KEPT: usize = 4;
/// Bytes of a pickle that are kept.
const MAX_BYTES: usize = 16 << 20;

/// Files that were decoded.
#[derive(Debug, Default)]
pub struct Known {
    kept: Vec<Kept>,
}

/// What is compared of a file.
#[derive(Debug, PartialEq, Eq)]
struct Kept {
    pickle: Vec<u8>,
    /// Key and bytes of each storage, in the order of the file.
    storages: Vec<(String, u64)>,
}

/// A file that was read.
#[derive(Debug)]
pub enum Read {
    /// It is equal to the known file with this number.
    Equal(usize),
    /// It was decoded.
    Decoded(Box<Decoded>),
}

/// A file that was decoded.
#[derive(Debug)]
pub struct Decoded {
    /// It.
    pub file: TorchFile,
    /// Its values by path.
    pub leaves: Vec<(String, Leaf)>,
    kept: Option<Kept>,
}

impl Known {
    /// Reads a file. It is decoded unless it is equal to a known one.
    ///
    /// # Errors
    /// It cannot be read, is damaged, or has something that is refused.
    pub fn read(&self, path: &Path, follow_links: bool) -> Result<Read> {
        let read = || {
            let source = Source::open(path, follow_links, Method::Read)?;
            let parts = [Part::of_small(&source)?];
            let window = Window::whole(&source).with(&parts);
            let (file, kept) = if is_zip(window)? {
                let archive = unpacked(window)?;
                let is_equal = |kept: &Kept| kept.is_equal(&archive);
                if let Some(number) = self.kept.iter().position(is_equal) {
                    return Ok(Read::Equal(number));
                }
                let kept = Kept::of(&archive);
                (TorchFile::of_archive(archive)?, kept)
            } else {
                (TorchFile::read(window)?, None)
            };
            let leaves = file.leaves()?;
            Ok(Read::Decoded(Box::new(Decoded { file, leaves, kept })))
        };
        read().map_err(|error: Error| error.within(path.display()).path(path))
    }

    /// Keeps a file that was decoded as the next one that is known. Returns whether there was room for it.
    pub fn keep(&mut self, decoded: &mut Decoded) -> bool {
        let has_room = self.kept.len() < MAX_KEPT;
        let kept = decoded.kept.take().filter(|_| has_room);
        let is_kept = kept.is_some();
        self.kept.extend(kept);
        is_kept
    }
}

impl Kept {
    fn of(archive: &Archive<'_>) -> Option<Self> {
        let storages = archive.storages.iter();
        (archive.pickle.len() <= MAX_BYTES).then(|| Self {
            pickle: archive.pickle.to_vec(),
            storages: storages.map(|one| (one.key.clone(), one.n_bytes)).collect(),
        })
    }

    fn is_equal(&self, archive: &Archive<'_>) -> bool {
        let found = archive.storages.iter().map(|one| (&*one.key, one.n_bytes));
        let kept = self.storages.iter().map(|(key, n)| (key.as_str(), *n));
        *self.pickle == *archive.pickle && kept.eq(found)
    }
}
