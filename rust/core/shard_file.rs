//! One safetensors file: its checked header and its bytes.

use crate::dtype::Dtype;
use crate::error::Result;
use crate::header::Header;
use crate::source::{Method, Source};
use std::path::Path;

/// An opened shard file whose header has proved right.
#[derive(Debug)]
pub struct ShardFile {
    source: Source,
    header: Header,
}

impl ShardFile {
    /// Opens a file and checks its header.
    pub fn open(path: &Path, follow_links: bool, method: Method) -> Result<Self> {
        let source = Source::open(path, follow_links, method)?;
        let header = source
            .with_file(|file| Header::read(file, path, source.n_bytes()))
            .map_err(|error| error.within(path.display()))?;
        Ok(Self { source, header })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The bytes.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// dtype, shape and first byte in the file of a tensor.
    pub fn tensor(&self, name: &str) -> Option<(Dtype, Vec<u64>, u64)> {
        let entry = self.header.entry(self.header.find(name)?);
        Some((
            entry.dtype,
            entry.shape,
            self.header.data_start() + entry.start,
        ))
    }
}
