//! Mesh, layout and request.

use crate::errors::raise;
use crate::records::tile_tuple;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyTuple;
use reshard_core::error::Printable;
use reshard_core::layout::{Block, DimPartition, Uneven};
use reshard_core::mesh::Place;
use reshard_core::region::Region;
use reshard_core::request::{RankRequest, Requested};
use reshard_core::{Error, Kind};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An entry of `place`: names of axes, first = outermost, and the folded coordinate on them.
type NamedPlace = (Vec<String>, u64);

#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Mesh(pub(crate) Arc<reshard_core::mesh::Mesh>);

#[pymethods]
impl Mesh {
    #[new]
    #[pyo3(signature = (axes, ranks=None))]
    fn new(py: Python<'_>, axes: Vec<(String, u64)>, ranks: Option<Vec<u64>>) -> PyResult<Self> {
        raise(py, reshard_core::mesh::Mesh::new(axes, ranks)).map(|mesh| Self(Arc::new(mesh)))
    }

    #[getter]
    fn axes(&self) -> Vec<(String, u64)> {
        self.0.axes().to_vec()
    }

    #[getter]
    fn ranks(&self) -> Vec<u64> {
        (0..self.0.n_points())
            .map(|position| self.0.rank_at(position))
            .collect()
    }

    #[getter]
    fn n_ranks(&self) -> u64 {
        self.0.n_points()
    }

    fn coordinates(&self, py: Python<'_>, rank: u64) -> PyResult<BTreeMap<String, u64>> {
        let position = raise(py, self.0.position(rank))?;
        let axes = self.0.axes().iter().enumerate();
        Ok(axes
            .map(|(axis, (name, _))| (name.clone(), self.0.coordinate(position, axis)))
            .collect())
    }

    fn fixed(&self, py: Python<'_>, place: Vec<NamedPlace>) -> PyResult<BTreeMap<String, u64>> {
        let fixed = raise(py, self.fixed_axes(&place))?;
        let axes = self.0.axes().iter().zip(fixed);
        Ok(axes
            .filter_map(|((name, _), at)| Some((name.clone(), at?)))
            .collect())
    }

    fn held(&self, py: Python<'_>, place: Vec<NamedPlace>) -> PyResult<Vec<u64>> {
        let fixed = raise(py, self.fixed_axes(&place))?;
        Ok(self
            .positions(&fixed)
            .map(|position| self.0.rank_at(position))
            .collect())
    }

    fn folded(
        &self,
        py: Python<'_>,
        axes: Vec<String>,
        place: Vec<NamedPlace>,
    ) -> PyResult<Vec<u64>> {
        let axes = raise(py, self.axis_numbers(&axes))?;
        let fixed = raise(py, self.fixed_axes(&place))?;
        Ok(self
            .positions(&fixed)
            .map(|position| self.0.fold(position, &axes))
            .collect())
    }
}

impl Mesh {
    fn axis_numbers(&self, names: &[String]) -> reshard_core::Result<Vec<usize>> {
        names.iter().map(|name| self.0.axis(name)).collect()
    }

    fn places(&self, place: &[NamedPlace]) -> reshard_core::Result<Vec<Place>> {
        place
            .iter()
            .map(|(names, at)| Ok((self.axis_numbers(names)?, *at)))
            .collect()
    }

    fn fixed_axes(&self, place: &[NamedPlace]) -> reshard_core::Result<Vec<Option<u64>>> {
        self.0.fixed(&self.places(place)?)
    }

    /// The positions with these coordinates, in mesh order.
    fn positions(&self, fixed: &[Option<u64>]) -> impl Iterator<Item = u64> {
        (0..self.0.n_points()).filter(|&position| self.0.is_at(position, fixed))
    }
}

/// `reshard.layout.partition.TensorLayout`, by its attributes.
#[derive(FromPyObject)]
struct TensorLayout {
    shape: Vec<u64>,
    partition: Partition,
    place: Vec<NamedPlace>,
}

/// `reshard.layout.partition.Partition`, by its attributes.
#[derive(FromPyObject)]
struct Partition {
    cut: Vec<Vec<String>>,
    uneven: String,
    sizes: Vec<(usize, Vec<u64>)>,
    blocks: Vec<(usize, Blocks)>,
    flat: Vec<String>,
    stored: Vec<usize>,
}

#[derive(FromPyObject)]
enum Blocks {
    Equal(u64),
    Listed(Vec<NamedBlock>),
}

#[derive(FromPyObject)]
struct NamedBlock {
    size: u64,
    is_cut: bool,
}

impl Partition {
    /// The partition of a tensor of this shape, with the axes of a mesh by number.
    fn on(
        self,
        mesh: &Mesh,
        shape: &[u64],
    ) -> reshard_core::Result<reshard_core::layout::Partition> {
        let n = shape.len();
        let outside = |what: &str, d: usize| {
            let message = format!("`{what}` names dim {d}, the tensor has {n} dims");
            Error::new(Kind::Layout, message)
        };
        let mut dims = vec![DimPartition::default(); n];
        for (d, names) in self.cut.iter().enumerate() {
            if let Some(dim) = dims.get_mut(d) {
                dim.axes = mesh.axis_numbers(names)?;
            } else if !names.is_empty() {
                return Err(outside("cut", d));
            }
        }
        for (d, sizes) in self.sizes {
            dims.get_mut(d).ok_or_else(|| outside("sizes", d))?.sizes = Some(sizes);
        }
        for (d, blocks) in self.blocks {
            let dim = dims.get_mut(d).ok_or_else(|| outside("blocks", d))?;
            dim.blocks = Some(match blocks {
                Blocks::Equal(n) => Block::equal(shape[d], n)?,
                Blocks::Listed(blocks) => {
                    let block = |NamedBlock { size, is_cut }| Block { size, is_cut };
                    blocks.into_iter().map(block).collect()
                }
            });
        }
        let uneven = match self.uneven.as_str() {
            "refuse" => Uneven::Refuse,
            "ceil" => Uneven::Ceil,
            other => {
                let message = format!("`uneven` is `{other}`; `refuse` or `ceil` are accepted");
                return Err(Error::new(Kind::Layout, message));
            }
        };
        let flat = mesh.axis_numbers(&self.flat)?;
        Ok(reshard_core::layout::Partition {
            dims,
            uneven,
            flat: (!flat.is_empty()).then_some(flat),
            stored: (!self.stored.is_empty()).then_some(self.stored),
        })
    }
}

#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Layout(pub(crate) Arc<reshard_core::layout::Layout>);

#[pymethods]
impl Layout {
    #[new]
    fn new(py: Python<'_>, mesh: &Mesh, layout: TensorLayout) -> PyResult<Self> {
        let TensorLayout {
            shape,
            partition,
            place,
        } = layout;
        let make = || {
            let partition = partition.on(mesh, &shape)?;
            let place = mesh.places(&place)?;
            reshard_core::layout::Layout::new(Arc::clone(&mesh.0), shape, partition, &place)
        };
        raise(py, make()).map(|layout| Self(Arc::new(layout)))
    }

    #[getter]
    fn mesh(&self) -> Mesh {
        Mesh(Arc::clone(self.0.mesh()))
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.shape())
    }

    #[getter]
    fn is_grid(&self) -> bool {
        self.0.is_grid()
    }

    fn holds(&self, py: Python<'_>, rank: u64) -> PyResult<bool> {
        Ok(self.0.holds(self.position(py, rank)?))
    }

    fn holders(&self) -> Vec<u64> {
        self.0
            .holders()
            .map(|position| self.0.mesh().rank_at(position))
            .collect()
    }

    fn block_shape<'py>(&self, py: Python<'py>, rank: u64) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.block_shape(self.position(py, rank)?))
    }

    fn local_shape<'py>(&self, py: Python<'py>, rank: u64) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.local_shape(self.position(py, rank)?))
    }

    fn tiles<'py>(&self, py: Python<'py>, rank: u64) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        self.0
            .tiles(self.position(py, rank)?)
            .iter()
            .map(|tile| tile_tuple(py, tile))
            .collect()
    }
}

impl Layout {
    fn position(&self, py: Python<'_>, rank: u64) -> PyResult<u64> {
        raise(py, self.0.mesh().position(rank))
    }
}

/// The position of a rank; an error names the key.
fn position_of(
    layout: &reshard_core::layout::Layout,
    key: &str,
    rank: u64,
) -> reshard_core::Result<u64> {
    let position = layout.mesh().position(rank);
    position.map_err(|error| error.within(format_args!("`{}`", Printable(key))).key(key))
}

#[pyclass(module = "reshard._core")]
pub(crate) struct Request(pub(crate) Requested);

#[pymethods]
impl Request {
    #[new]
    fn new() -> Self {
        Self(Requested::Listed(reshard_core::request::Request::default()))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn add(
        &mut self,
        py: Python<'_>,
        name: &str,
        key: &str,
        layout: &Layout,
        rank: u64,
    ) -> PyResult<()> {
        let position = layout.position(py, rank)?;
        let request = raise(py, self.0.listed())?;
        raise(py, request.add(name, key, &layout.0, position))
    }

    /// For each rank a request for the parts of several keys that it holds, each under the name of its key.
    #[staticmethod]
    fn of_ranks(
        py: Python<'_>,
        keys: Vec<(PyBackedStr, Bound<'_, Layout>)>,
        ranks: Vec<u64>,
    ) -> PyResult<Vec<Self>> {
        let keys: Arc<[_]> = keys
            .iter()
            .map(|(key, layout)| (key.to_string(), Arc::clone(&layout.get().0)))
            .collect();
        let request = |rank| {
            Ok(Self(Requested::OfRank(RankRequest::new(
                Arc::clone(&keys),
                rank,
            )?)))
        };
        let requests: reshard_core::Result<_> = ranks.into_iter().map(request).collect();
        raise(py, requests)
    }

    /// The parts of several keys that a rank holds, each under the name of its key.
    fn add_all(
        &mut self,
        py: Python<'_>,
        keys: Vec<(PyBackedStr, Bound<'_, Layout>)>,
        rank: u64,
    ) -> PyResult<()> {
        let request = raise(py, self.0.listed())?;
        for (key, layout) in &keys {
            let layout = &layout.get().0;
            let position = raise(py, position_of(layout, key, rank))?;
            raise(py, request.add(key, key, layout, position))?;
        }
        Ok(())
    }

    fn add_region(
        &mut self,
        py: Python<'_>,
        name: &str,
        key: &str,
        offset: Vec<u64>,
        shape: Vec<u64>,
    ) -> PyResult<()> {
        let region = raise(
            py,
            Region::new(offset, shape).map_err(|error| error.key(key)),
        )?;
        raise(py, self.0.listed())?.add_region(name, key, region);
        Ok(())
    }

    fn add_joined(&mut self, py: Python<'_>, joined: &Joined, rank: u64) -> PyResult<()> {
        let request = raise(py, self.0.listed())?;
        raise(py, request.add_joined(&joined.0, rank))
    }
}

/// Tensors that are one flat array on each rank.
#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Joined(Arc<reshard_core::joined::Joined>);

#[pymethods]
impl Joined {
    #[new]
    fn new(
        py: Python<'_>,
        name: String,
        members: Vec<(String, Bound<'_, Layout>)>,
        align: u64,
    ) -> PyResult<Self> {
        let members = members.into_iter();
        let members = members.map(|(key, layout)| (key, Arc::clone(&layout.get().0)));
        let joined = reshard_core::joined::Joined::new(name, members.collect(), align);
        raise(py, joined).map(|joined| Self(Arc::new(joined)))
    }

    /// The elements that a rank holds, and their tiles with their keys.
    fn part<'py>(
        &self,
        py: Python<'py>,
        rank: u64,
    ) -> PyResult<(u64, Vec<(&str, Bound<'py, PyTuple>)>)> {
        let part = raise(py, self.0.part_of(rank))?;
        let tiles = part.tiles.iter().map(|(number, tile)| {
            let (key, _) = &self.0.keys()[*number as usize];
            Ok((key.as_str(), tile_tuple(py, tile)?))
        });
        Ok((part.n, tiles.collect::<PyResult<_>>()?))
    }

    /// The elements of each distinct part, and the ranks that hold it, by the lowest ranks.
    fn groups(&self, py: Python<'_>) -> PyResult<Vec<(u64, Vec<u64>)>> {
        let mesh = self.0.mesh();
        let mut positions: Vec<u64> = (0..mesh.n_points()).collect();
        positions.sort_unstable_by_key(|&position| mesh.rank_at(position));
        let groups = py.detach(|| self.0.groups(positions));
        let ranks = |(n, positions): (u64, Vec<u64>)| {
            let ranks = positions.iter().map(|&position| mesh.rank_at(position));
            (n, ranks.collect())
        };
        Ok(raise(py, groups)?.into_iter().map(ranks).collect())
    }
}
