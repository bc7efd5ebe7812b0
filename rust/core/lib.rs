//! Bytes and geometry of sharded checkpoints: shard files, layouts, checked plans, parallel copies.
//!
//! This crate knows shard files, tiles and plans. It knows nothing of checkpoints, steps or frameworks, reads no
//! environment variable and prints nothing. Offsets and shapes are in elements unless a name ends in `_bytes`.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("reshard addresses files of any size: 64-bit targets only");

// Values.
pub mod dtype;
pub mod error;

// What files say of themselves.
pub mod header;
pub mod metadata;

pub use error::{Error, Kind, Result};
