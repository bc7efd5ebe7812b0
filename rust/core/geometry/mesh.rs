//! A device mesh: named axes, their sizes, and the global rank at each point.

use crate::error::{Error, Kind, Printable, Result};
use std::collections::HashMap;

/// Most points of a mesh. It bounds the memory of tables with one entry per rank.
pub const MAX_POINTS: u64 = 1 << 20;
/// Most axes. A mesh of `MAX_POINTS` points has fewer axes of size 2 or more.
const MAX_AXES: usize = 256;

/// Axes, first = outermost, and the folded coordinate on them at which ranks hold a tensor.
pub type Place = (Vec<usize>, u64);

/// A device mesh. The first axis varies slowest; points are row-major.
#[derive(Debug, PartialEq, Eq)]
pub struct Mesh {
    axes: Vec<(String, u64)>,
    strides: Vec<u64>,
    n_points: u64,
    /// `None` if each rank equals its position.
    ranks: Option<Ranks>,
}

#[derive(Debug, PartialEq, Eq)]
struct Ranks {
    by_position: Vec<u64>,
    positions: HashMap<u64, u64>,
}

impl Mesh {
    /// Creates a mesh of named axes. `ranks` lists the global rank at each point, by default the position of the point.
    pub fn new(axes: Vec<(String, u64)>, ranks: Option<Vec<u64>>) -> Result<Self> {
        if axes.len() > MAX_AXES {
            let message = format!("the mesh has {} axes, more than {MAX_AXES}", axes.len());
            return Err(Error::new(Kind::Layout, message));
        }
        let mut n_points: u64 = 1;
        for (i, (name, size)) in axes.iter().enumerate() {
            if name.is_empty() || *size == 0 {
                let message = format!(
                    "mesh axis `{}` has size {size}; expected a name and a size of at least 1",
                    Printable(name)
                );
                return Err(Error::new(Kind::Layout, message));
            }
            if axes[..i].iter().any(|(other, _)| other == name) {
                return Err(Error::new(
                    Kind::Layout,
                    format!("mesh axis `{}` occurs twice", Printable(name)),
                ));
            }
            n_points = n_points
                .checked_mul(*size)
                .filter(|n| *n <= MAX_POINTS)
                .ok_or_else(|| {
                    Error::new(
                        Kind::Layout,
                        format!("the mesh has more than {MAX_POINTS} points"),
                    )
                })?;
        }
        let mut strides = vec![1; axes.len()];
        for a in (1..axes.len()).rev() {
            strides[a - 1] = strides[a] * axes[a].1;
        }
        let ranks = ranks
            .map(|by_position| Self::check_ranks(by_position, n_points))
            .transpose()?;
        Ok(Self {
            axes,
            strides,
            n_points,
            ranks,
        })
    }

    fn check_ranks(by_position: Vec<u64>, n_points: u64) -> Result<Ranks> {
        if by_position.len() as u64 != n_points {
            let message = format!(
                "`ranks` lists {} ranks, the mesh has {n_points} points",
                by_position.len()
            );
            return Err(Error::new(Kind::Layout, message));
        }
        let mut positions = HashMap::with_capacity(by_position.len());
        for (position, rank) in by_position.iter().enumerate() {
            if positions.insert(*rank, position as u64).is_some() {
                return Err(Error::new(
                    Kind::Layout,
                    format!("`ranks` lists rank {rank} twice"),
                ));
            }
        }
        Ok(Ranks {
            by_position,
            positions,
        })
    }

    /// Names and sizes of the axes.
    pub fn axes(&self) -> &[(String, u64)] {
        &self.axes
    }

    /// Number of points.
    pub fn n_points(&self) -> u64 {
        self.n_points
    }

    /// Number of an axis.
    pub fn axis(&self, name: &str) -> Result<usize> {
        self.axes
            .iter()
            .position(|(axis, _)| axis == name)
            .ok_or_else(|| {
                let known: Vec<_> = self.axes.iter().map(|(axis, _)| axis.as_str()).collect();
                Error::new(
                    Kind::Layout,
                    format!(
                        "the mesh has no axis `{}`; its axes: {}",
                        Printable(name),
                        known.join(", ")
                    ),
                )
            })
    }

    /// Size of an axis.
    pub fn size(&self, axis: usize) -> u64 {
        self.axes[axis].1
    }

    /// Difference of the positions of adjacent points on an axis.
    pub fn stride(&self, axis: usize) -> u64 {
        self.strides[axis]
    }

    /// The global rank at a position.
    pub fn rank_at(&self, position: u64) -> u64 {
        self.ranks
            .as_ref()
            .map_or(position, |ranks| ranks.by_position[position as usize])
    }

    /// The position of a global rank.
    pub fn position(&self, rank: u64) -> Result<u64> {
        let found = match &self.ranks {
            None => (rank < self.n_points).then_some(rank),
            Some(ranks) => ranks.positions.get(&rank).copied(),
        };
        found.ok_or_else(|| {
            Error::new(
                Kind::Layout,
                format!("rank {rank} is not in the mesh of {} ranks", self.n_points),
            )
        })
    }

    /// The coordinate of a position on an axis.
    pub fn coordinate(&self, position: u64, axis: usize) -> u64 {
        position / self.strides[axis] % self.axes[axis].1
    }

    /// Combines the coordinates on several axes to one, outermost axis first.
    pub fn fold(&self, position: u64, axes: &[usize]) -> u64 {
        axes.iter().fold(0, |folded, &axis| {
            folded * self.size(axis) + self.coordinate(position, axis)
        })
    }

    /// The part of the position that a combined coordinate on several axes determines.
    pub fn unfold(&self, mut folded: u64, axes: &[usize]) -> u64 {
        let mut position = 0;
        for &axis in axes.iter().rev() {
            position += folded % self.size(axis) * self.strides[axis];
            folded /= self.size(axis);
        }
        position
    }

    /// For each axis the coordinate that `place` fixes; every entry holds.
    ///
    /// # Errors
    ///
    /// [`Kind::Layout`] if a coordinate is out of range, or two entries fix an axis at different coordinates.
    pub fn fixed(&self, place: &[Place]) -> Result<Vec<Option<u64>>> {
        let mut fixed = vec![None; self.axes.len()];
        for (axes, coordinate) in place {
            let n = self.n_folded(axes);
            if *coordinate >= n {
                let message =
                    format!("place coordinate {coordinate} is outside the axes of {n} coordinates");
                return Err(Error::new(Kind::Layout, message));
            }
            let position = self.unfold(*coordinate, axes);
            for &axis in axes {
                let at = self.coordinate(position, axis);
                if let Some(other) = fixed[axis].replace(at).filter(|other| *other != at) {
                    let message = format!(
                        "`place` fixes axis `{}` at {other} and at {at}: no rank holds the tensor",
                        self.axes[axis].0
                    );
                    return Err(Error::new(Kind::Layout, message));
                }
            }
        }
        Ok(fixed)
    }

    /// Whether a position has the coordinates that [`Self::fixed`] returned.
    pub fn is_at(&self, position: u64, fixed: &[Option<u64>]) -> bool {
        let mut axes = fixed.iter().enumerate();
        axes.all(|(axis, at)| at.is_none_or(|at| self.coordinate(position, axis) == at))
    }

    /// Product of the sizes of some axes.
    pub fn n_folded(&self, axes: &[usize]) -> u64 {
        axes.iter().map(|&axis| self.size(axis)).product()
    }
}
