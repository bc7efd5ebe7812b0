//! The records of a `metadata.json` during parsing. A field that has not been read is `None`.

use super::json::{List, Nullable, Number, Object, Record, Records, Skip, Text, read};
use super::{DeviceLayout, MAX_RANKS};
use reshard_core::error::{Error, Kind, Printable, Result};
use reshard_core::header::MAX_RANK;
use serde::de::MapAccess;
use std::borrow::Cow;

/// The fields of a tensor.
#[derive(Default)]
pub(super) struct TensorRecord<'de> {
    pub(super) properties: Option<PropertiesRecord<'de>>,
    pub(super) shape: Option<Vec<u64>>,
    pub(super) fragmentations: Option<Vec<u64>>,
    pub(super) has_layout: bool,
    pub(super) layout: Option<LayoutRecord>,
    pub(super) chunks: Option<Vec<ChunkRecord>>,
}

impl<'de> Record<'de> for TensorRecord<'de> {
    const FIELDS: &'static [&'static str] = &[
        "properties",
        "global_shape",
        "axis_fragmentations",
        "layout",
        "chunk",
    ];

    fn field<A: MapAccess<'de>>(&mut self, field: usize, map: &mut A) -> Result<(), A::Error> {
        match field {
            0 => map.next_value_seed(Object(self.properties.insert(PropertiesRecord::default()))),
            1 => read(map, List::numbers(MAX_RANK), &mut self.shape),
            2 => read(map, List::numbers(MAX_RANK), &mut self.fragmentations),
            3 => {
                self.has_layout = true;
                map.next_value_seed(Nullable::default())
                    .map(|layout| self.layout = layout)
            }
            _ => read(map, Records::default(), &mut self.chunks),
        }
    }
}

#[derive(Default)]
pub(super) struct PropertiesRecord<'de> {
    pub(super) dtype: Option<Cow<'de, str>>,
}

impl<'de> Record<'de> for PropertiesRecord<'de> {
    const FIELDS: &'static [&'static str] = &[
        "dtype",
        "replica_id",
        "allow_shape_mismatch",
        "allow_to_save",
    ];

    fn field<A: MapAccess<'de>>(&mut self, field: usize, map: &mut A) -> Result<(), A::Error> {
        match field {
            0 => read(map, Text, &mut self.dtype),
            // These fields are not used: `storage_data` lists the ranks that hold a shard.
            _ => map.next_value_seed(Skip::default()),
        }
    }
}

#[derive(Default)]
pub(super) struct LayoutRecord {
    pub(super) device_matrix: Option<Vec<u64>>,
    pub(super) tensor_map: Option<Vec<Vec<u64>>>,
    pub(super) is_interleaved: Option<bool>,
    pub(super) alias_name: Option<Vec<String>>,
    pub(super) rank_list: Option<Vec<u64>>,
}

impl<'de> Record<'de> for LayoutRecord {
    const FIELDS: &'static [&'static str] = &[
        "device_matrix",
        "tensor_map",
        "interleaved_parallel",
        "alias_name",
        "rank_list",
    ];

    fn field<A: MapAccess<'de>>(&mut self, field: usize, map: &mut A) -> Result<(), A::Error> {
        match field {
            0 => read(map, List::numbers(MAX_RANK), &mut self.device_matrix),
            1 => read(map, List::tensor_map(), &mut self.tensor_map),
            2 => map
                .next_value()
                .map(|is_interleaved| self.is_interleaved = Some(is_interleaved)),
            3 => map.next_value_seed(List::texts(MAX_RANK)).map(|names| {
                self.alias_name = Some(names.into_iter().map(Cow::into_owned).collect());
            }),
            _ => read(map, List::numbers(MAX_RANKS), &mut self.rank_list),
        }
    }
}

impl LayoutRecord {
    /// Checks the fields for consistency.
    pub(super) fn check(self) -> Result<DeviceLayout> {
        let missing = |field: &str| Error::damaged(format!("`layout.{field}` is missing"));
        let layout = DeviceLayout {
            device_matrix: self.device_matrix.ok_or_else(|| missing("device_matrix"))?,
            tensor_map: self.tensor_map.ok_or_else(|| missing("tensor_map"))?,
            alias_name: self.alias_name.ok_or_else(|| missing("alias_name"))?,
            rank_list: self.rank_list.ok_or_else(|| missing("rank_list"))?,
            interleaved_parallel: self
                .is_interleaved
                .ok_or_else(|| missing("interleaved_parallel"))?,
        };
        if layout.interleaved_parallel {
            return Err(Error::new(
                Kind::Unsupported,
                "`layout.interleaved_parallel` is true, which is not supported",
            )
            .hint("save the checkpoint without interleaved parallelism"));
        }
        let matrix = &layout.device_matrix;
        let n_axes = matrix.len();
        let n_ranks = matrix
            .iter()
            .try_fold(1_u64, |n, &size| n.checked_mul(size));
        if n_ranks != Some(layout.rank_list.len() as u64) || layout.rank_list.is_empty() {
            return Err(Error::damaged(format!(
                "`layout.device_matrix` is {matrix:?}, but `layout.rank_list` has {} ranks",
                layout.rank_list.len()
            )));
        }
        if layout.alias_name.len() != n_axes {
            return Err(Error::damaged(format!(
                "`layout.device_matrix` has {n_axes} axes, but `layout.alias_name` has {} names",
                layout.alias_name.len()
            )));
        }
        let mut names: Vec<_> = layout.alias_name.iter().collect();
        names.sort_unstable();
        if let Some([name, _]) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::damaged(format!(
                "`layout.alias_name` has `{}` twice",
                Printable(name)
            )));
        }
        let mut used = vec![false; n_axes];
        for &axis in layout.tensor_map.iter().flatten() {
            if axis >= n_axes as u64 {
                return Err(Error::damaged(format!(
                    "`layout.tensor_map` has axis {axis}, numbered from 0, but `layout.device_matrix` has {n_axes} axes"
                )));
            }
            if std::mem::replace(&mut used[axis as usize], true) {
                return Err(Error::damaged(format!(
                    "`layout.tensor_map` uses axis {axis} twice"
                )));
            }
        }
        Ok(layout)
    }
}

#[derive(Default)]
pub(super) struct ChunkRecord {
    pub(super) offset: Option<Vec<u64>>,
    pub(super) local_shape: Option<Vec<u64>>,
}

impl<'de> Record<'de> for ChunkRecord {
    const FIELDS: &'static [&'static str] = &["global_offset", "local_shape"];

    fn field<A: MapAccess<'de>>(&mut self, field: usize, map: &mut A) -> Result<(), A::Error> {
        match field {
            0 => read(map, List::numbers(MAX_RANK), &mut self.offset),
            _ => read(map, List::numbers(MAX_RANK), &mut self.local_shape),
        }
    }
}

/// One file that holds a shard.
#[derive(Default)]
pub(super) struct HolderRecord<'de> {
    pub(super) file: Option<Cow<'de, str>>,
    pub(super) rank: Option<u64>,
}

impl<'de> Record<'de> for HolderRecord<'de> {
    const FIELDS: &'static [&'static str] = &["file_name", "storage_rank", "rank_group"];

    fn field<A: MapAccess<'de>>(&mut self, field: usize, map: &mut A) -> Result<(), A::Error> {
        match field {
            0 => read(map, Text, &mut self.file),
            1 => read(map, Number, &mut self.rank),
            // The ranks that held the same shard. It is not used: every stored copy is valid.
            _ => map.next_value_seed(Skip::default()),
        }
    }
}
