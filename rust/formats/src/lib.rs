//! The files of a checkpoint that describe its shard files: `metadata.json` and strategy files.
//!
//! This crate decodes and checks the content of these files. It opens no file. The core does not depend on it.

pub mod metadata;
pub mod strategy;
