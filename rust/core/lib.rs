//! Bytes and geometry of sharded checkpoints: shard files, layouts, checked plans, parallel copies.
//!
//! This crate handles shard files, tiles and plans. It has no notion of steps or frameworks, reads no environment
//! variable and prints nothing. `reshard-formats` decodes the files that describe checkpoints. Offsets and shapes are
//! in elements unless a name ends in `_bytes`.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("reshard needs a 64-bit target: offsets in files are held in `usize`");

// Values.
pub mod dtype;
pub mod error;
pub mod layout;
pub mod mesh;
pub mod patterns;
pub mod region;
pub mod tile;

// Reading: the header or the records, one shard file, the table of a checkpoint.
pub mod ckpt;
pub mod header;
pub mod listed;
pub mod local_array;
pub mod shard_file;
pub mod source;

// Where each shard is stored; the checked plan.
mod factors;
pub mod index;
pub mod plan;
pub mod request;
pub mod stored;

// Moving bytes.
pub mod cast;
pub mod control;
pub mod copy;
mod fetch;
pub mod memory;
mod readahead;
pub mod strided;
pub mod team;
pub mod tuning;

// Writing one file durably; verification of what is read.
pub mod checksum;
pub mod finite;
pub mod route;
pub mod small_files;
pub mod snapshot;
pub mod verify;
pub mod writer;

pub use error::{Error, Kind, Result};
