//! One safetensors file: its checked header and its bytes.

use crate::checksum::Sums;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::header::Header;
use crate::source::{Method, Source};
use std::path::Path;
use std::sync::Arc;

/// An opened shard file whose header has proved right.
#[derive(Debug)]
pub struct ShardFile {
    source: Source,
    header: Header,
    sums: Option<Arc<Sums>>,
}

impl ShardFile {
    /// Opens a file and checks its header; where sums are told, also that it has their size and header.
    pub fn open(
        path: &Path,
        follow_links: bool,
        method: Method,
        sums: Option<Arc<Sums>>,
    ) -> Result<Self> {
        let source = Source::open(path, follow_links, method)?;
        if let Some(sums) = &sums
            && source.n_bytes() != sums.n_bytes()
        {
            let message = format!(
                "{} has {} bytes, {} were written",
                path.display(),
                source.n_bytes(),
                sums.n_bytes()
            );
            return Err(Error::damaged(message).path(path));
        }
        let header = source.with_file(|file| Header::read(file, path, source.n_bytes()));
        let altered = || {
            let message = format!(
                "{}: the header is not the one that was written",
                path.display()
            );
            Error::damaged(message).path(path)
        };
        if let Some(sums) = &sums {
            // A header that is not the one that was written is best told so, whatever else is wrong with it.
            match &header {
                Ok(header) if header.sum() == sums.header_sum() => {}
                Err(error) if error.kind() == crate::Kind::Io => {}
                _ => return Err(altered()),
            }
        }
        let header = header.map_err(|error| error.within(path.display()))?;
        if sums
            .as_ref()
            .is_some_and(|sums| sums.header_bytes() != header.data_start())
        {
            return Err(altered());
        }
        Ok(Self {
            source,
            header,
            sums,
        })
    }

    /// The sums of its chunks, where they are known.
    pub fn sums(&self) -> Option<&Arc<Sums>> {
        self.sums.as_ref()
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
