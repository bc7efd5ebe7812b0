//! Regions: half-open boxes of a tensor, in elements.

use crate::error::{Error, Kind, Result};
use crate::geometry::dtype::n_elements;
use std::fmt;

/// A half-open box of a tensor: `offset` and `shape`, one entry per dim. A 0-d region has one element.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Region {
    offset: Vec<u64>,
    shape: Vec<u64>,
}

impl Region {
    /// Creates a region.
    ///
    /// # Errors
    /// Offset and shape differ in length, or their sum or the number of elements overflows.
    pub fn new(offset: Vec<u64>, shape: Vec<u64>) -> Result<Self> {
        let fits = offset
            .iter()
            .zip(&shape)
            .all(|(o, s)| o.checked_add(*s).is_some());
        if offset.len() != shape.len() || !fits || n_elements(&shape).is_none() {
            let message = format!(
                "offset {} and shape {} do not form a region",
                Dims(&offset),
                Dims(&shape)
            );
            return Err(Error::new(Kind::Argument, message));
        }
        Ok(Self { offset, shape })
    }

    /// The region of a complete tensor. Its number of elements must not overflow.
    pub fn whole(shape: &[u64]) -> Self {
        Self {
            offset: vec![0; shape.len()],
            shape: shape.to_vec(),
        }
    }

    /// Index of the first element in each dim.
    pub fn offset(&self) -> &[u64] {
        &self.offset
    }

    /// Number of elements in each dim.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Number of dims.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// One past the last index of a dim.
    pub fn end(&self, dim: usize) -> u64 {
        self.offset[dim] + self.shape[dim]
    }

    /// Number of elements.
    pub fn n_elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Whether it is inside a tensor of this shape.
    pub fn lies_in(&self, shape: &[u64]) -> bool {
        self.rank() == shape.len() && (0..self.rank()).all(|d| self.end(d) <= shape[d])
    }

    /// The intersection; `None` if it is empty.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        debug_assert_eq!(self.rank(), other.rank());
        let mut offset = Vec::with_capacity(self.rank());
        let mut shape = Vec::with_capacity(self.rank());
        for d in 0..self.rank() {
            let start = self.offset[d].max(other.offset[d]);
            let end = self.end(d).min(other.end(d));
            if end <= start {
                return None;
            }
            offset.push(start);
            shape.push(end - start);
        }
        Some(Self { offset, shape })
    }

    /// The elements of `self` that are not in `other`, as disjoint regions, at most two per dim.
    pub fn subtract(&self, other: &Self) -> Vec<Self> {
        let Some(common) = self.intersect(other) else {
            return vec![self.clone()];
        };
        let mut rest = Vec::new();
        let mut core = self.clone();
        for d in 0..self.rank() {
            let (start, end) = (common.offset[d], common.end(d));
            for (from, to) in [(core.offset[d], start), (end, core.end(d))] {
                if from < to {
                    let mut part = core.clone();
                    part.offset[d] = from;
                    part.shape[d] = to - from;
                    rest.push(part);
                }
            }
            core.offset[d] = start;
            core.shape[d] = end - start;
        }
        rest
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "offset {} shape {}",
            Dims(&self.offset),
            Dims(&self.shape)
        )
    }
}

/// Displays a shape or offset as a Python tuple: `(4, 2)`, `(8,)`, `()`.
pub struct Dims<'a>(pub &'a [u64]);

impl fmt::Display for Dims<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        write!(
            f,
            "({}{})",
            text.join(", "),
            if text.len() == 1 { "," } else { "" }
        )
    }
}

/// Element strides of a row-major array.
pub fn row_major_strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1);
    }
    strides
}

/// Where an element of an array is, by its index in each dim and the strides.
pub(crate) fn element_of(index: &[u64], strides: &[u64]) -> u64 {
    index
        .iter()
        .zip(strides)
        .map(|(i, stride)| i * stride)
        .sum()
}

/// Whether these are the strides of a row-major array.
pub(crate) fn is_row_major(shape: &[u64], strides: &[u64]) -> bool {
    let mut expected = 1_u64;
    let mut dims = shape.iter().zip(strides).rev();
    shape.len() == strides.len()
        && dims.all(|(extent, stride)| {
            let is_right = *stride == expected;
            expected = expected.wrapping_mul(*extent.max(&1));
            is_right
        })
}

/// The row-major range `start..end` of an array as regions, in order: at most `2 n - 1` for `n` dims.
pub fn flat_range_boxes(shape: &[u64], start: u64, end: u64) -> Vec<Region> {
    let mut boxes = Vec::new();
    let mut region = Region {
        offset: Vec::new(),
        shape: Vec::new(),
    };
    push_flat_range(shape, start, end, &mut region, &mut boxes);
    boxes
}

fn push_flat_range(
    shape: &[u64],
    start: u64,
    end: u64,
    prefix: &mut Region,
    boxes: &mut Vec<Region>,
) {
    if start >= end {
        return;
    }
    let Some((_, inner_shape)) = shape.split_first() else {
        boxes.push(prefix.clone());
        return;
    };
    let inner: u64 = inner_shape.iter().product();
    let descend = |row: u64, from: u64, to: u64, prefix: &mut Region, boxes: &mut Vec<Region>| {
        prefix.offset.push(row);
        prefix.shape.push(1);
        push_flat_range(inner_shape, from, to, prefix, boxes);
        prefix.offset.pop();
        prefix.shape.pop();
    };
    let (first, last) = (start / inner, (end - 1) / inner);
    let (head, tail) = (start - first * inner, end - last * inner);
    if first == last && (head != 0 || tail != inner) {
        descend(first, head, tail, prefix, boxes);
        return;
    }
    let (mut from, mut to) = (first, last + 1);
    if head != 0 {
        descend(first, head, inner, prefix, boxes);
        from += 1;
    }
    if tail != inner {
        to -= 1;
    }
    if from < to {
        let mut rows = prefix.clone();
        rows.offset.push(from);
        rows.shape.push(to - from);
        rows.offset
            .extend(std::iter::repeat_n(0, inner_shape.len()));
        rows.shape.extend(inner_shape);
        boxes.push(rows);
    }
    if tail != inner {
        descend(last, 0, tail, prefix, boxes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_ranges_are_covered_once_in_order() {
        for shape in [
            vec![],
            vec![7],
            vec![3, 4],
            vec![2, 3, 4],
            vec![1, 5, 1],
            vec![2, 2, 2, 3],
        ] {
            let n: u64 = shape.iter().product();
            let strides = row_major_strides(&shape);
            for start in 0..=n {
                for end in start..=n {
                    let boxes = flat_range_boxes(&shape, start, end);
                    assert!(boxes.len() <= (2 * shape.len()).saturating_sub(1).max(1));
                    let mut covered = Vec::new();
                    for region in &boxes {
                        let base: u64 =
                            region.offset.iter().zip(&strides).map(|(o, s)| o * s).sum();
                        covered.extend(base..base + region.n_elements());
                    }
                    assert_eq!(
                        covered,
                        (start..end).collect::<Vec<_>>(),
                        "{shape:?} {start}..{end}"
                    );
                }
            }
        }
    }

    #[test]
    fn subtract_leaves_the_rest_once() {
        let whole = Region::whole(&[4, 5]);
        let hole = Region::new(vec![1, 2], vec![2, 9]).unwrap();
        let rest = whole.subtract(&hole);
        assert_eq!(rest.iter().map(Region::n_elements).sum::<u64>(), 20 - 6);
        assert!(rest.iter().all(|r| r.intersect(&hole).is_none()));
    }
}
