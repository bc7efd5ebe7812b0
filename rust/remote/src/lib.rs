//! Objects in S3, Google Cloud Storage, Azure Blob Storage and behind HTTP: their names, sizes and ranges of bytes, and
//! writing them.
//!
//! An object is named by a URL: `s3://bucket/key`, `gs://bucket/key`, `az://container/key`, `https://host/path`. This crate
//! reads the variables of the environment and the files in which each cloud keeps credentials. They appear in no error
//! and in no debug output.

pub mod address;

pub mod options;

mod failure;

mod environment;

mod proxy;

mod service;
mod tls;

mod pace;

mod client;

pub mod limit;

pub mod cache;

pub mod object;

pub mod folder;

pub mod write;

pub mod upload;

mod xml;

pub mod ask;

pub mod unfinished;

pub mod lifecycle;

pub use address::Address;
pub use cache::Cache;
pub use options::{Options, set_cache, set_options};

/// Lets the core open and write objects by their URL.
pub fn install() {
    reshard_core::writer::set_object_writer(reshard_core::writer::ObjectWriter {
        begin: upload::begin,
        open_upload: upload::open,
        part_bytes: upload::part_bytes,
    });
    reshard_core::source::set_object_opener(object::open);
}
