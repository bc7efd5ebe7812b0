//! `reshard._core`: the Python binding of the core. It converts arguments, releases the interpreter, and maps errors.
//! `python/reshard/_core.pyi` documents the interface.

#![allow(
    clippy::needless_pass_by_value,
    reason = "arguments are extracted from Python by value"
)]
#![allow(clippy::type_complexity, reason = "Python gets plain tuples")]

mod arrays;
mod buffer;
mod errors;
mod geometry;
mod gguf;
mod index;
mod metadata;
mod patterns;
mod plan;
mod quantised;
mod ranks;
mod records;
#[cfg(feature = "remote")]
mod remote;
mod run;
mod strategy;
mod torch;
mod values;
mod verify;
mod write;

use pyo3::prelude::*;

/// The Rust core: geometry and bytes.
#[pymodule]
mod _core {
    #[cfg(feature = "remote")]
    #[pymodule_export]
    use super::remote::{
        RemoteObject, begin_upload, complete_upload, end_upload, lifecycle_rules, limit_requests,
        object_names, object_status, objects_below, put_new_object, put_object, read_small_object,
        remote_counts, remove_objects, set_bucket_options, set_cache, shown_url,
        unfinished_uploads, upload_file,
    };
    #[pymodule_export]
    use super::{
        arrays::{ArrayColumns, array_kinds, reordered},
        buffer::Buffer,
        default_threads, dtype_bits,
        geometry::{Joined, Layout, Mesh, Request},
        gguf::read_gguf,
        index::{FlatLines, Index},
        metadata::{MetadataEncoder, are_plain},
        patterns::{Expression, IndexPattern, Patterns, number_groups},
        plan::{Loaded, Plan, write_sums},
        quantised::add_quantised,
        ranks::{RankTensors, read_torch_ranks},
        records::{FileArray, FileTensor},
        strategy::{decode_strategy, encode_strategy},
        torch::{
            Opaque, add_torch_wholes, decode_torch_object, open_dcp, open_dcp_ranks,
            read_dcp_paths, read_torch_contents, read_torch_file, read_torch_object,
        },
        verify::{ValueCounts, changes, crc32c, differing, scrub},
        write::{
            Buffers, Snapshot, SnapshotPool, Written, folder_sizes, rename, sync_together,
            write_arrays,
        },
    };
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        #[cfg(feature = "remote")]
        reshard_remote::install();
        super::records::add_to(module)?;
        module.add("ZEROS", reshard_core::stored::ZEROS)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

#[pyfunction]
fn dtype_bits(dtype: values::DtypeName) -> u64 {
    dtype.0.bits()
}

#[pyfunction]
fn default_threads() -> usize {
    run::default_threads()
}
