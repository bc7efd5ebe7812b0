//! Mesh, layout and request.

use crate::errors::raise;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use reshard_core::layout::{Block, DimSpec, Spec, Uneven};
use reshard_core::region::Region;
use reshard_core::{Error, Kind};
use std::collections::BTreeMap;
use std::sync::Arc;

/// `(offset, shape, local_offset, local_strides)`
pub(crate) type TileTuple<'py> = (
    Bound<'py, PyTuple>,
    Bound<'py, PyTuple>,
    u64,
    Bound<'py, PyTuple>,
);

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
}

#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct Layout(pub(crate) Arc<reshard_core::layout::Layout>);

#[pymethods]
impl Layout {
    #[new]
    #[pyo3(signature = (mesh, shape, cut=None, *, uneven="refuse", sizes=None, blocks=None, flat=None, stored=None, place=None))]
    #[expect(clippy::too_many_arguments, reason = "the fields of a layout file")]
    fn new(
        py: Python<'_>,
        mesh: &Mesh,
        shape: Vec<u64>,
        cut: Option<Vec<Vec<String>>>,
        uneven: &str,
        sizes: Option<BTreeMap<usize, Vec<u64>>>,
        blocks: Option<BTreeMap<usize, Vec<(u64, bool)>>>,
        flat: Option<Vec<String>>,
        stored: Option<Vec<usize>>,
        place: Option<Vec<(Vec<String>, u64)>>,
    ) -> PyResult<Self> {
        let make = || {
            let axes = |names: &[String]| {
                names
                    .iter()
                    .map(|name| mesh.0.axis(name))
                    .collect::<Result<Vec<_>, _>>()
            };
            let n = shape.len();
            let outside = |what: &str, d: usize| {
                Error::new(
                    Kind::Layout,
                    format!("`{what}` has an entry for dim {d}, but the tensor has {n} dims"),
                )
            };
            let mut dims = vec![DimSpec::default(); n];
            for (d, names) in cut.unwrap_or_default().iter().enumerate() {
                if let Some(dim) = dims.get_mut(d) {
                    dim.axes = axes(names)?;
                } else if !names.is_empty() {
                    return Err(outside("cut", d));
                }
            }
            for (d, sizes) in sizes.unwrap_or_default() {
                dims.get_mut(d).ok_or_else(|| outside("sizes", d))?.sizes = Some(sizes);
            }
            for (d, blocks) in blocks.unwrap_or_default() {
                let blocks = blocks
                    .into_iter()
                    .map(|(size, is_cut)| Block { size, is_cut })
                    .collect();
                dims.get_mut(d).ok_or_else(|| outside("blocks", d))?.blocks = Some(blocks);
            }
            let uneven = match uneven {
                "refuse" => Uneven::Refuse,
                "ceil" => Uneven::Ceil,
                other => {
                    let message = format!("`uneven` is `{other}`; `refuse` or `ceil` are accepted");
                    return Err(Error::new(Kind::Layout, message));
                }
            };
            let flat = flat.map(|names| axes(&names)).transpose()?;
            let place = place
                .unwrap_or_default()
                .iter()
                .map(|(names, at)| Ok((axes(names)?, *at)))
                .collect::<Result<Vec<_>, Error>>()?;
            let spec = Spec {
                shape,
                dims,
                uneven,
                flat,
                stored,
                place,
            };
            reshard_core::layout::Layout::new(Arc::clone(&mesh.0), spec)
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

    fn tiles<'py>(&self, py: Python<'py>, rank: u64) -> PyResult<Vec<TileTuple<'py>>> {
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

pub(crate) fn tile_tuple<'py>(
    py: Python<'py>,
    tile: &reshard_core::tile::Tile,
) -> PyResult<TileTuple<'py>> {
    Ok((
        PyTuple::new(py, tile.global.offset())?,
        PyTuple::new(py, tile.global.shape())?,
        tile.local_offset,
        PyTuple::new(py, &tile.local_strides)?,
    ))
}

#[pyclass(module = "reshard._core")]
pub(crate) struct Request(pub(crate) reshard_core::request::Request);

#[pymethods]
impl Request {
    #[new]
    fn new() -> Self {
        Self(reshard_core::request::Request::default())
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
        raise(py, self.0.add(name, key, &layout.0, position))
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
        self.0.add_region(name, key, region);
        Ok(())
    }

    fn add_joined(
        &mut self,
        py: Python<'_>,
        name: &str,
        members: Vec<(String, Bound<'_, Layout>)>,
        rank: u64,
        align: u64,
    ) -> PyResult<()> {
        let members: Vec<_> = members
            .iter()
            .map(|(key, layout)| (key.clone(), Arc::clone(&layout.get().0)))
            .collect();
        raise(py, self.0.add_joined(name, &members, rank, align))
    }

    /// Shape of the array that was added last, and its tiles with their keys.
    fn last<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Option<(Bound<'py, PyTuple>, Vec<(String, TileTuple<'py>)>)>> {
        let Some(wanted) = self.0.last() else {
            return Ok(None);
        };
        let tiles = wanted.tiles().iter();
        let tiles = tiles.map(|(key, tile)| Ok((key.clone(), tile_tuple(py, tile)?)));
        Ok(Some((
            PyTuple::new(py, wanted.shape())?,
            tiles.collect::<PyResult<_>>()?,
        )))
    }
}
