//! Bytes and geometry of sharded checkpoints: shard files, layouts, checked plans, parallel copies.
//!
//! This crate handles shard files, tiles and plans. It has no notion of steps or frameworks, reads no environment
//! variable and prints nothing. `reshard-formats` decodes the files that describe checkpoints. Offsets and shapes are
//! in elements unless a name ends in `_bytes`.
//!
//! A module uses only modules that are declared above it. Other crates name a module without its folder.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("reshard needs a 64-bit target: offsets in files are held in `usize`");

pub mod error;

pub mod control;
pub mod numbered;
pub mod patterns;

/// Values: element types, boxes, device meshes, and the part of a tensor that each rank holds.
pub mod geometry {
    pub mod dtype;
    pub mod region;
    pub mod tile;

    pub mod mesh;

    pub mod layout;

    pub mod joined;
}

/// Memory, the copies between slices of it, and the threads that execute them.
pub mod bytes {
    pub mod memory;

    pub mod cast;
    pub mod team;

    pub mod strided;
}

/// One file: its bytes, its checksums, its table of tensors.
pub mod files {
    pub mod checksum;
    pub mod source;

    pub mod header;

    pub mod local_array;

    pub mod listed;

    pub mod shard_file;
}

/// What is requested, where each shard is stored, and the checked plan of the copies.
pub mod planning {
    pub mod plan;
    pub mod request;

    pub(crate) mod divided;
    pub(crate) mod factors;
    pub mod flat;

    pub mod stored;

    pub mod extents;

    pub mod index;
}

/// Verification of bytes that are read, values that are not finite, and arrays that must agree.
pub mod check {
    pub mod changes;

    pub(crate) mod digest;

    pub mod finite;

    pub mod verify;
}

/// Execution of a plan: the bytes of files become arrays in memory.
pub mod read {
    pub(crate) mod readahead;

    pub mod window;

    pub(crate) mod fetch;

    pub mod copy;

    pub mod copies;
}

/// Writing files durably: one, many small ones of a folder, or in the background.
pub mod write {
    pub mod route;

    pub mod writer;

    pub mod small_files;
    pub mod snapshot;
}

pub use bytes::{cast, memory, strided, team};
pub use check::{changes, finite, verify};
pub use error::{Error, Kind, Result};
pub use files::{checksum, header, listed, local_array, shard_file, source};
pub use geometry::{dtype, joined, layout, mesh, region, tile};
pub use planning::{extents, flat, index, plan, request, stored};
pub use read::{copies, copy, window};
pub use write::{route, small_files, snapshot, writer};
