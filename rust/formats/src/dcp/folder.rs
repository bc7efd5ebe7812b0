//! A folder of `torch.distributed.checkpoint`, opened: the index of its tensors, and what its descriptions say beside them.

use super::{Dcp, index_of};
use reshard_core::Result;
use reshard_core::index::Index;
use reshard_core::source::Method;
use std::path::Path;
use std::sync::Arc;

/// An opened folder.
#[derive(Debug)]
pub struct Folder {
    /// Its tensors.
    pub index: Index,
    /// Its items that are no tensors.
    pub objects: Vec<StoredObject>,
    /// Names of tensors that are not read, and why.
    pub unsupported: Vec<(String, String)>,
    /// Its files, and where the last item of each ends, in bytes.
    pub files: Vec<(String, u64)>,
}

/// An item that is no tensor: an object of `torch.save` in a range of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredObject {
    /// Its name.
    pub name: String,
    /// The name of its file.
    pub file: String,
    /// Its first byte in the file.
    pub start: u64,
    /// Its bytes.
    pub n_bytes: u64,
    /// How the bytes were transformed.
    pub transforms: Vec<String>,
}

/// Opens a folder with one `.metadata`, of which this is the content.
///
/// # Errors
/// The description is damaged, or something in it is refused.
pub fn open(folder: &Path, data: &[u8], method: Method) -> Result<Folder> {
    Folder::new(folder, decode(folder, ".metadata", data)?, method)
}

/// Opens a folder with a description of each rank, given as name and content.
///
/// # Errors
/// As [`open`], or two descriptions contradict each other.
pub fn open_ranks(
    folder: &Path,
    descriptions: &[(String, Vec<u8>)],
    method: Method,
) -> Result<Folder> {
    let parts = descriptions
        .iter()
        .map(|(name, data)| decode(folder, name, data));
    let merged = Dcp::merged(parts.collect::<Result<Vec<_>>>()?);
    let merged = merged.map_err(|error| error.within(folder.display()).path(folder))?;
    Folder::new(folder, merged, method)
}

fn decode(folder: &Path, name: &str, data: &[u8]) -> Result<Dcp> {
    let path = folder.join(name);
    Dcp::decode(data).map_err(|error| error.within(path.display()).path(&path))
}

impl Folder {
    fn new(folder: &Path, dcp: Dcp, method: Method) -> Result<Self> {
        let dcp = Arc::new(dcp);
        let index = index_of(&dcp, folder, method)
            .map_err(|error| error.within(folder.display()).path(folder))?;
        let objects = dcp.objects.iter().map(|(name, place)| StoredObject {
            name: name.clone(),
            file: dcp.files[place.file as usize].clone(),
            start: place.offset,
            n_bytes: place.n_bytes,
            transforms: dcp.transforms[place.transforms as usize].clone(),
        });
        let unsupported = dcp
            .tensors
            .iter()
            .filter_map(|tensor| Some((tensor.name.clone(), tensor.dtype.clone().err()?)));
        Ok(Self {
            index,
            objects: objects.collect(),
            unsupported: unsupported.collect(),
            files: dcp.files.iter().cloned().zip(dcp.ends()).collect(),
        })
    }
}
