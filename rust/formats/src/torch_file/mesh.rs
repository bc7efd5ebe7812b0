//! Which part of a `DTensor` a rank of a device mesh holds: computed from the mesh and the placements as torch computes it.
//!
//! ```text
//! spec         mesh; placements: one for each axis of the mesh; shard_order of newer versions
//! mesh         _layout (axes or shape), or, in older versions, mesh: a tensor of ranks; _coordinate_on_dim, or
//!              _flatten_mesh_list or _flatten_rank_map: the ranks in the order of the mesh
//! placement    Replicate, Shard(dim), _StridedShard(dim, split_factor)
//! ```
//!
//! Source: `torch/distributed/tensor/_utils.py`, `placement_types.py` and `torch/distributed/device_mesh.py` of torch 2.4
//! to 2.15.

use super::{Sharded, TorchFile};
use crate::pickle::{Id, Value};
use reshard_core::error::Printable;
use reshard_core::header::MAX_RANK;
use reshard_core::region::Dims;
use reshard_core::{Error, Kind, Result};
use std::collections::HashMap;
use std::slice::from_ref;

const MAX_AXES: usize = 16;
/// Of one axis: lists in a file can contain each other.
const MAX_SIZES: usize = 256;
const MAX_RANKS: u64 = 1 << 31;

/// The meshes of a file that are known, for one rank.
#[derive(Debug)]
pub struct Meshes {
    rank: u64,
    known: HashMap<Id, Option<Mesh>>,
    /// Where the rank stands in a list of ranks.
    places: HashMap<Id, Option<u64>>,
}

#[derive(Debug)]
struct Mesh {
    /// The size of each axis.
    sizes: Vec<u64>,
    /// The coordinates of the rank.
    coordinate: Option<Vec<u64>>,
}

/// The cuts of a tensor.
struct Cuts {
    /// Axis and dim of each shard.
    plain: Vec<(usize, usize)>,
    /// Axis, dim and split factor of each strided shard.
    strided: Vec<(usize, usize, i64)>,
}

impl Meshes {
    /// None, of the file of a rank.
    pub fn new(rank: u64) -> Self {
        Self {
            rank,
            known: HashMap::new(),
            places: HashMap::new(),
        }
    }
}

impl TorchFile {
    /// The first element of the part of a tensor that the rank of the meshes holds, which has this name.
    ///
    /// # Errors
    /// The mesh or a placement is invalid or not supported, or the stored tensor has another shape than the part.
    pub fn part_offset(
        &self,
        name: &str,
        sharded: &Sharded,
        meshes: &mut Meshes,
    ) -> Result<Vec<u64>> {
        let invalid =
            |fault: &str| Error::damaged(format!("`{}` is invalid: {fault}", Printable(name)));
        let unfit = "its mesh and its placements do not belong together";
        let mesh = self.attribute(sharded.spec, "mesh");
        let mesh = mesh.and_then(|mesh| self.mesh(mesh, meshes));
        let mesh = mesh.ok_or_else(|| invalid(unfit))?;
        let placements = self.attribute(sharded.spec, "placements");
        let placements = placements.and_then(|id| self.pickle.sequence(id));
        let placements = placements.filter(|all| all.len() == mesh.sizes.len());
        let placements = placements.ok_or_else(|| invalid(unfit))?;
        let coordinate = mesh.coordinate.as_ref();
        let coordinate = coordinate
            .ok_or_else(|| unsupported(name, "does not say which rank of its mesh wrote it"))?;
        let n_dims = sharded.shape.len();
        let mut cuts = Cuts {
            plain: Vec::new(),
            strided: Vec::new(),
        };
        for (axis, &placement) in placements.iter().enumerate() {
            let kind = self.class_name(placement);
            match kind {
                "Replicate" => continue,
                "Shard" | "_StridedShard" => {}
                _ => {
                    let message = format!(
                        "has the placement `{}`, and no file holds its values",
                        Printable(kind)
                    );
                    return Err(unsupported(name, &message)
                        .hint("redistribute it to `Shard` or `Replicate` before it is saved"));
                }
            }
            let found = self.dim_and_factor(placement).and_then(|(dim, factor)| {
                let n = i64::try_from(n_dims).ok()?;
                let dim = if dim < 0 { dim.checked_add(n)? } else { dim };
                let dim = usize::try_from(dim).ok().filter(|dim| *dim < n_dims)?;
                Some((dim, factor))
            });
            let (dim, factor) = found.ok_or_else(|| {
                invalid(&format!(
                    "its placement on axis {axis} of the mesh is invalid"
                ))
            })?;
            if kind == "Shard" {
                cuts.plain.push((axis, dim));
            } else {
                cuts.strided.push((axis, dim, factor));
            }
        }
        self.check_cuts(name, sharded.spec, &cuts, &mesh.sizes)?;
        let (mut offset, mut extent) = (vec![0; n_dims], sharded.shape.clone());
        // A strided cut is made after those of the axes to its right.
        let strided = cuts.strided.iter().map(|&(axis, dim, _)| (axis, dim));
        for (axis, dim) in cuts.plain.iter().copied().chain(strided) {
            let chunk = extent[dim].div_ceil(mesh.sizes[axis]);
            let start = extent[dim].min(chunk.saturating_mul(coordinate[axis]));
            offset[dim] += start;
            extent[dim] = chunk.min(extent[dim] - start);
        }
        // torch can keep another shape of a part without elements.
        let is_empty = extent.contains(&0) && sharded.local.shape.contains(&0);
        if extent != sharded.local.shape && !is_empty {
            return Err(invalid(&format!(
                "its part of {} has the shape {}, and {} is stored",
                Dims(&sharded.shape),
                Dims(&extent),
                Dims(&sharded.local.shape)
            )));
        }
        Ok(offset)
    }

    /// Refuses cuts of a dim in another order than that of the axes, which newer versions of torch can record, and strided
    /// ones that are not made after all cuts to their right.
    fn check_cuts(&self, name: &str, spec: Id, cuts: &Cuts, sizes: &[u64]) -> Result<()> {
        for &(axis, dim, factor) in &cuts.strided {
            let right = cuts
                .plain
                .iter()
                .filter(|(other, of)| *other > axis && *of == dim);
            let right = right.fold(1_u64, |n, (other, _)| n.saturating_mul(sizes[*other]));
            let n_same = cuts.strided.iter().filter(|(_, of, _)| *of == dim).count();
            if n_same > 1 || u64::try_from(factor) != Ok(right) {
                let message = format!(
                    "has a strided placement with the split factor {factor} on a mesh of other sizes, which is not \
                     supported"
                );
                return Err(unsupported(name, &message));
            }
        }
        let order = self.attribute(spec, "shard_order");
        let Some(order) = order.and_then(|id| self.pickle.sequence(id)) else {
            return Ok(());
        };
        let is_in_order = |entry: &Id| {
            let parts = self
                .pickle
                .record(*entry)
                .map_or(*entry, |one| one.arguments);
            let Some(&[dim, axes]) = self.pickle.sequence(parts) else {
                return false;
            };
            let of_dim = cuts
                .plain
                .iter()
                .filter(|(_, of)| self.pickle.int(dim) == i64::try_from(*of).ok());
            let axes = self
                .pickle
                .sequence(axes)
                .filter(|all| all.len() <= MAX_AXES);
            axes.is_some_and(|axes| {
                let axes = axes.iter().map(|axis| self.pickle.int(*axis));
                axes.eq(of_dim.map(|(axis, _)| i64::try_from(*axis).ok()))
            })
        };
        if cuts.strided.is_empty() && (order.len() > MAX_RANK || !order.iter().all(is_in_order)) {
            let message = "is cut in another order than that of the axes of its mesh";
            return Err(unsupported(name, message));
        }
        Ok(())
    }

    /// The name of the class of a value that is no plain one.
    fn class_name(&self, id: Id) -> &str {
        let class = self.pickle.record(id).map_or(id, |record| record.function);
        self.pickle.name(class).map_or("?", |(_, name)| name)
    }

    /// The dim and the split factor of a placement, from its attributes or its arguments.
    fn dim_and_factor(&self, placement: Id) -> Option<(i64, i64)> {
        if let Some(dim) = self.given(placement, "dim") {
            let factor = self.attribute(placement, "split_factor");
            let factor = factor.map_or(Some(1), |id| self.pickle.int(id));
            return Some((self.pickle.int(dim)?, factor?));
        }
        let record = self.pickle.record(placement)?;
        let state = record
            .state
            .filter(|id| matches!(self.pickle.get(*id), Value::Tuple(_)));
        let given = self.pickle.sequence(state.unwrap_or(record.arguments))?;
        let factor = given
            .get(1)
            .map_or(Some(1), |factor| self.pickle.int(*factor));
        Some((self.pickle.int(*given.first()?)?, factor?))
    }

    fn mesh<'a>(&self, id: Id, meshes: &'a mut Meshes) -> Option<&'a Mesh> {
        if !meshes.known.contains_key(&id) {
            let mesh = self.mesh_sizes(id).map(|sizes| Mesh {
                coordinate: self.coordinate(id, &sizes, meshes),
                sizes,
            });
            meshes.known.insert(id, mesh);
        }
        meshes.known[&id].as_ref()
    }

    /// The sizes of the axes of a mesh.
    fn mesh_sizes(&self, mesh: Id) -> Option<Vec<u64>> {
        let axes = |ids: &[Id]| {
            let sizes = ids.iter().map(|id| self.axis_size(*id));
            (ids.len() <= MAX_AXES).then(|| sizes.collect())?
        };
        let Some(layout) = self.given(mesh, "_layout") else {
            let tensor = self.pickle.record(self.attribute(mesh, "mesh")?)?;
            let shape = *self.arguments(tensor).get(2)?;
            return axes(self.pickle.sequence(shape)?);
        };
        let listed = self.attribute(layout, "axes");
        if let Some(listed) = listed.and_then(|id| self.pickle.sequence(id)) {
            let listed = listed.iter().take(MAX_AXES + 1);
            let shapes = listed.map(|axis| self.attribute(*axis, "shape"));
            return axes(&shapes.collect::<Option<Vec<_>>>()?);
        }
        let shape = self.attribute(layout, "shape")?;
        axes(self.pickle.sequence(shape).unwrap_or(from_ref(&shape)))
    }

    /// The number of ranks of an axis, which can be made of several.
    fn axis_size(&self, shape: Id) -> Option<u64> {
        let (mut product, mut left) = (1_u64, vec![shape]);
        for _ in 0..MAX_SIZES {
            let Some(one) = left.pop() else {
                return Some(product).filter(|product| *product < MAX_RANKS);
            };
            let size = self.pickle.int(one).and_then(|one| u64::try_from(one).ok());
            if let Some(size) = size.filter(|size| (1..MAX_RANKS).contains(size)) {
                product = product.saturating_mul(size);
            } else {
                let more = self.pickle.sequence(one)?;
                left.extend(Some(more).filter(|more| more.len() <= MAX_AXES)?);
            }
        }
        None
    }

    /// The coordinates of the rank in a mesh.
    fn coordinate(&self, mesh: Id, sizes: &[u64], meshes: &mut Meshes) -> Option<Vec<u64>> {
        let known = self.attribute(mesh, "_coordinate_on_dim");
        if let Some(known) = known.and_then(|id| self.pickle.sequence(id)) {
            let places = known.iter().zip(sizes).map(|(at, size)| {
                let at = u64::try_from(self.pickle.int(*at)?).ok()?;
                (at < *size).then_some(at)
            });
            return (known.len() == sizes.len()).then(|| places.collect())?;
        }
        let listed = self.attribute(mesh, "_flatten_mesh_list");
        let listed = listed.or_else(|| self.attribute(mesh, "_flatten_rank_map"))?;
        let ranks = self.pickle.sequence(listed)?;
        let n = sizes.iter().fold(1_u64, |n, size| n.saturating_mul(*size));
        if ranks.len() as u64 != n {
            return None;
        }
        let rank = i64::try_from(meshes.rank).ok()?;
        let find = || {
            ranks
                .iter()
                .position(|id| self.pickle.int(*id) == Some(rank))
        };
        let place = meshes.places.entry(listed);
        let mut place = (*place.or_insert_with(|| find().map(|place| place as u64)))?;
        let mut coordinate = vec![0; sizes.len()];
        for (at, size) in coordinate.iter_mut().zip(sizes).rev() {
            *at = place % size;
            place /= size;
        }
        Some(coordinate)
    }

    fn attribute(&self, id: Id, name: &str) -> Option<Id> {
        self.member(self.pickle.record(id)?, name)
    }

    /// An attribute that is not `None`.
    fn given(&self, id: Id, name: &str) -> Option<Id> {
        self.attribute(id, name)
            .filter(|id| !matches!(self.pickle.get(*id), Value::None))
    }
}

fn unsupported(name: &str, what: &str) -> Error {
    Error::new(Kind::Unsupported, format!("`{}` {what}", Printable(name)))
}
