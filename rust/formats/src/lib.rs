//! The files of checkpoints that describe tensors: `metadata.json`, strategy files, `.ckpt` files, GGUF files, files of
//! `torch.save` and `.metadata` of `torch.distributed.checkpoint`.
//!
//! This crate decodes and checks the content of these files. It opens them by the sources of the core, which does not
//! depend on it.

pub mod ckpt;
pub mod compressed;
pub mod dcp;
pub mod gguf;
pub mod metadata;
pub mod objects;
pub mod pickle;
pub mod quantised;
pub mod rank_tensors;
pub mod strategy;
pub mod torch_file;
pub mod zip;
