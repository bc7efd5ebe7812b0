//! `ShardedTensor`: a tensor of which a file has the regions of one rank, and says where the regions of all ranks lie.
//!
//! ```text
//! (local shards, metadata, state of the process group, sharding spec, whether there are references to other processes)
//!
//! local shard                   tensor, metadata
//! metadata of a shard           shard_offsets, shard_sizes, placement
//! metadata                      shards_metadata: those of all ranks; size; tensor_properties: (dtype, ...)
//! state of the process group    local_rank, global_rank, local_world_size, global_world_size
//! ```
//!
//! Torch from 1.13 on pickles it as a call that makes a tensor of this type, with the tuple as its state; older versions, of
//! which it is no tensor, as an object with that state.
//!
//! Source: `torch/distributed/_shard/sharded_tensor/api.py`, `metadata.py` and `shard.py`, and
//! `torch/distributed/_shard/metadata.py`, of torch 2.15.

use super::{Tensor, TorchFile, named_dtype};
use crate::pickle::{Id, Record};
use reshard_core::dtype::Dtype;
use reshard_core::header::MAX_RANK;
use reshard_core::{Error, Kind, Result};
use std::collections::HashSet;

const API: &str = "torch.distributed._shard.sharded_tensor.api";
/// What the classes of the values are called: those of the outer objects stand in modules below it.
const SHARD: &str = "torch.distributed._shard.";
/// Attributes of an object: a device mesh has thirteen. Many objects can share them, and each one is searched.
const MAX_ATTRIBUTES: usize = 64;

/// The regions of a tensor that one file holds, and where those of all files lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Regions {
    /// The element type.
    pub dtype: Dtype,
    /// The shape of the whole tensor in elements.
    pub shape: Vec<u64>,
    /// The first element of each stored region, and its values.
    pub held: Vec<(Vec<u64>, Tensor)>,
    /// Of the regions of all ranks, one after the other: the first element, and the shape.
    pub all: Vec<u64>,
    /// The rank that wrote it.
    pub rank: u64,
    /// How many ranks there were.
    pub n_ranks: u64,
}

impl Regions {
    /// The stored regions by the names under which the file has them: that of the tensor if there is one.
    pub fn named(&self, name: &str) -> impl Iterator<Item = (String, &[u64], &Tensor)> {
        let is_one = self.held.len() == 1;
        let held = self.held.iter().enumerate();
        held.map(move |(i, (offset, tensor))| {
            let name = if is_one {
                name.to_owned()
            } else {
                format!("{name}[{i}]")
            };
            (name, offset.as_slice(), tensor)
        })
    }
}

impl TorchFile {
    /// How many numbers [`Self::regions`] makes of a value; 0 if it is none. Values can share a list of regions.
    pub(super) fn n_regions(&self, id: Id) -> usize {
        let count = || {
            let (_, state) = self.sharded_tensor(id)?;
            let metadata = self.pickle.record(*self.pickle.sequence(state?)?.get(1)?)?;
            let of = |name| self.pickle.sequence(self.member(metadata, name)?);
            Some((1 + of("shards_metadata")?.len()) * (1 + of("size")?.len()))
        };
        count().unwrap_or(0)
    }

    /// Whether a value is a `ShardedTensor`, valid or not.
    pub fn is_sharded_tensor(&self, id: Id) -> bool {
        self.sharded_tensor(id).is_some()
    }

    /// The regions that a value is, or `None` if it is something else.
    ///
    /// # Errors
    /// It is a `ShardedTensor`, and its shards contradict what it says of them, or lie outside of the tensor.
    pub fn regions(&self, id: Id) -> Result<Option<Regions>> {
        let Some((made, state)) = self.sharded_tensor(id) else {
            return Ok(None);
        };
        let parts = state.and_then(|state| self.pickle.sequence(state));
        let Some(&[held, metadata, group, ..]) = parts else {
            return Err(lacks(
                "its shards, its metadata or the state of its processes",
            ));
        };
        let metadata = self.shard_record(metadata, "ShardedTensorMetadata")?;
        let shape = self.dims_of(self.required(metadata, "size")?)?;
        let dtype = self.dtype_of(self.required(metadata, "tensor_properties")?)?;
        if let Some(made) = made {
            // What the type of the tensor was made with: (type, dtype, size, ...).
            let Some([_, of, size, ..]) = self.pickle.sequence(made) else {
                return Err(lacks("its dtype and its size"));
            };
            let (of, size) = (named_dtype(&self.pickle, *of)?, self.dims_of(*size)?);
            if (of, &size) != (dtype, &shape) {
                let message = format!(
                    "a ShardedTensor of {} and shape {size:?}, and of {} and shape {shape:?} in its metadata",
                    of.name(),
                    dtype.name()
                );
                return Err(Error::damaged(message));
            }
        }
        let listed = self.sequence_of(self.required(metadata, "shards_metadata")?)?;
        let mut all = Vec::with_capacity(listed.len() * 2 * shape.len());
        for one in listed {
            let (offset, extent) = self.box_of(*one, &shape)?;
            all.extend(offset);
            all.extend(extent);
        }
        let mut regions = Regions {
            dtype,
            held: Vec::new(),
            all,
            rank: 0,
            n_ranks: 0,
            shape,
        };
        self.add_held(&mut regions, held)?;
        let group = self.shard_record(group, "ShardedTensor.ProcessGroupState")?;
        regions.rank = self.extent(self.required(group, "global_rank")?)?;
        regions.n_ranks = self.extent(self.required(group, "global_world_size")?)?;
        if regions.rank >= regions.n_ranks {
            let message = format!(
                "a ShardedTensor of rank {} of {} ranks",
                regions.rank, regions.n_ranks
            );
            return Err(Error::damaged(message));
        }
        Ok(Some(regions))
    }

    /// Adds the stored regions. Each has to be one of those that are listed.
    fn add_held(&self, regions: &mut Regions, held: Id) -> Result<()> {
        let n_dims = regions.shape.len();
        let held = self.sequence_of(held)?;
        let mut known: HashSet<&[u64]> = match (held, n_dims) {
            ([], _) => HashSet::new(),
            // A number has one region.
            (_, 0) => [&[][..]].into(),
            _ => regions.all.chunks_exact(2 * n_dims).collect(),
        };
        let mut found = Vec::with_capacity(held.len());
        for one in held {
            let shard = self.shard_record(*one, "Shard")?;
            let (offset, extent) =
                self.box_of(self.required(shard, "metadata")?, &regions.shape)?;
            let tensor = self.not_nested(self.required(shard, "tensor")?)?;
            let tensor = tensor.ok_or_else(|| {
                let message =
                    "a ShardedTensor with a shard that is no dense tensor, which is not supported";
                Error::new(Kind::Unsupported, message)
            })?;
            if tensor.dtype != regions.dtype || tensor.shape != extent {
                let message = format!(
                    "a shard at {offset:?} is {} of shape {:?}, and {} of shape {extent:?} by its metadata",
                    tensor.dtype.name(),
                    tensor.shape,
                    regions.dtype.name()
                );
                return Err(Error::damaged(message));
            }
            let region = [offset.as_slice(), &extent].concat();
            if !known.remove(region.as_slice()) {
                let message = format!(
                    "a shard at {offset:?} of shape {extent:?}: its metadata does not list it, or lists it fewer times"
                );
                return Err(Error::damaged(message));
            }
            found.push((offset, tensor));
        }
        regions.held = found;
        Ok(())
    }

    /// What a `ShardedTensor` is made with, if it is made as a tensor, and its state.
    fn sharded_tensor(&self, id: Id) -> Option<(Option<Id>, Option<Id>)> {
        let record = self.pickle.record(id)?;
        let is_class = |id: Id| self.pickle.name(id) == Some((API, "ShardedTensor"));
        if is_class(record.function) {
            return Some((None, record.state));
        }
        let made = ("torch._tensor", "_rebuild_from_type_v2");
        match (self.pickle.name(record.function), self.arguments(record)) {
            (Some(name), [_, class, made_with, state, ..]) if name == made && is_class(*class) => {
                Some((Some(*made_with), Some(*state)))
            }
            _ => None,
        }
    }

    /// A record of a class of torch.
    fn shard_record(&self, id: Id, class: &str) -> Result<Record<'_>> {
        let record = self.pickle.record(id);
        let is_right = |record: &Record<'_>| {
            let name = self.pickle.name(record.function);
            name.is_some_and(|(module, name)| module.starts_with(SHARD) && name == class)
        };
        record.filter(is_right).ok_or_else(|| {
            Error::damaged(format!(
                "a ShardedTensor with something else than a `{class}`"
            ))
        })
    }

    /// An attribute of a record, whose state is a dict of attributes, or, with `__slots__`, a pair with one.
    pub(super) fn member(&self, record: Record<'_>, name: &str) -> Option<Id> {
        let state = record.state?;
        let parts = match self.pickle.sequence(state) {
            Some(parts) if parts.len() <= 2 => parts,
            Some(_) => return None,
            None => &[state],
        };
        let mut dicts = parts.iter().filter(|one| {
            let items = self.pickle.items(**one);
            items.is_some_and(|items| items.len() <= MAX_ATTRIBUTES)
        });
        dicts.find_map(|one| self.pickle.item(*one, name))
    }

    fn required(&self, record: Record<'_>, name: &str) -> Result<Id> {
        self.member(record, name)
            .ok_or_else(|| lacks(&format!("`{name}`")))
    }

    fn sequence_of(&self, id: Id) -> Result<&[Id]> {
        let items = self.pickle.sequence(id);
        items.ok_or_else(|| Error::damaged("a ShardedTensor with shards that are no list"))
    }

    /// Sizes or offsets, one a dim. Many regions can share a list of them, so a long one is not looked at.
    fn dims_of(&self, id: Id) -> Result<Vec<u64>> {
        let n_dims = self.pickle.sequence(id).map_or(0, <[Id]>::len);
        if n_dims > MAX_RANK {
            let message = format!("a ShardedTensor of {n_dims} dims, at most {MAX_RANK} are read");
            return Err(Error::new(Kind::Unsupported, message));
        }
        self.extents(id)
    }

    /// The dtype of the properties of a tensor: the first of their state.
    fn dtype_of(&self, id: Id) -> Result<Dtype> {
        let properties = self.shard_record(id, "TensorProperties")?;
        let state = properties
            .state
            .and_then(|state| self.pickle.sequence(state));
        match state {
            Some([dtype, ..]) => named_dtype(&self.pickle, *dtype),
            _ => Err(lacks("its dtype")),
        }
    }

    /// First element and shape of a region.
    fn box_of(&self, id: Id, shape: &[u64]) -> Result<(Vec<u64>, Vec<u64>)> {
        let metadata = self.shard_record(id, "ShardMetadata")?;
        let offset = self.dims_of(self.required(metadata, "shard_offsets")?)?;
        let extent = self.dims_of(self.required(metadata, "shard_sizes")?)?;
        let mut ends = offset.iter().zip(&extent).zip(shape);
        let is_inside = offset.len() == shape.len()
            && extent.len() == shape.len()
            && ends.all(|((at, n), of)| at.checked_add(*n).is_some_and(|end| end <= *of));
        if is_inside {
            return Ok((offset, extent));
        }
        let message =
            format!("a shard at {offset:?} of shape {extent:?} of a tensor of shape {shape:?}");
        Err(Error::damaged(message))
    }
}

fn lacks(what: &str) -> Error {
    Error::damaged(format!("a ShardedTensor without {what}"))
}
