//! The files of a checkpoint that describe its shard files: `metadata.json` and strategy files.
//!
//! This crate decodes and checks the content of these files. It opens no file, and the core does not depend on it: the
//! core gets tensors, files and tiles.

pub mod metadata;
pub mod strategy;
