//! Tensors that lie one after the other in flat arrays, and are divided without regard to their dims.
//!
//! A *line* is flat arrays one after the other. Either there is one line, with all elements of each tensor; or each rank
//! has a line in its file, of the same arrays, and an equal part of each tensor in it, the last parts shorter or empty.
//! A tensor of any number of ranks is then one number: where its elements, or its parts, begin in a line.

use crate::error::{Error, Kind, Result};
use crate::geometry::dtype::n_elements;
use crate::geometry::region::{Region, element_of, flat_range_boxes, row_major_strides};
use crate::geometry::tile::Tile;
use std::ops::Range;
use std::sync::Arc;

/// The flat arrays of one line, or of a line for each rank.
#[derive(Debug)]
pub struct Lines {
    /// The file of each array of the line, or of each rank.
    files: Vec<u32>,
    /// The stored name of each array of a line, and its shape.
    arrays: Vec<(String, [u64; 1])>,
    /// Where each array begins in the line, and where the line ends.
    starts: Vec<u64>,
    is_divided: bool,
}

impl Lines {
    /// One line of arrays, each with its file, its stored name and its elements.
    ///
    /// # Errors
    /// They are too large.
    pub fn joined(arrays: Vec<(u32, String, u64)>) -> Result<Self> {
        let (files, arrays) = arrays
            .into_iter()
            .map(|(file, name, n)| (file, (name, [n])))
            .unzip();
        Self::new(files, arrays, false)
    }

    /// A line for each rank, of arrays with these stored names and elements in its file.
    ///
    /// # Errors
    /// There is no rank, or they are too large.
    pub fn divided(files: Vec<u32>, arrays: Vec<(String, u64)>) -> Result<Self> {
        if files.is_empty() {
            return Err(Error::new(Kind::Argument, "there is no file"));
        }
        let arrays = arrays.into_iter().map(|(name, n)| (name, [n])).collect();
        Self::new(files, arrays, true)
    }

    fn new(files: Vec<u32>, arrays: Vec<(String, [u64; 1])>, is_divided: bool) -> Result<Self> {
        let mut starts = vec![0_u64];
        for (_, [n]) in &arrays {
            let end = starts[starts.len() - 1].checked_add(*n);
            let end = end.ok_or_else(|| Error::new(Kind::Argument, "a line is too large"))?;
            starts.push(end);
        }
        Ok(Self {
            files,
            arrays,
            starts,
            is_divided,
        })
    }

    /// Elements of a line.
    pub fn n(&self) -> u64 {
        self.starts[self.arrays.len()]
    }

    /// The file of each rank, if there is a line for each.
    pub(crate) fn files_of_ranks(&self) -> Option<&[u32]> {
        self.is_divided.then_some(&self.files)
    }

    /// The largest number of a file.
    pub(crate) fn last_file(&self) -> Option<u32> {
        self.files.iter().copied().max()
    }

    /// Each array: its file, its stored name and its shape.
    pub(crate) fn arrays(&self) -> impl Iterator<Item = (u32, &str, &[u64])> {
        let n_ranks = if self.is_divided { self.files.len() } else { 1 };
        let all = (0..n_ranks).flat_map(|rank| (0..self.arrays.len()).map(move |i| (rank, i)));
        all.map(|(rank, i)| {
            let (name, shape) = &self.arrays[i];
            (self.file(rank, i), name.as_str(), &shape[..])
        })
    }

    fn file(&self, rank: usize, array: usize) -> u32 {
        self.files[if self.is_divided { rank } else { array }]
    }

    /// The arrays with elements of a range of a line, which is not empty.
    fn over(&self, range: &Range<u64>) -> Range<usize> {
        let first = self.starts.partition_point(|start| *start <= range.start);
        first - 1..self.starts.partition_point(|start| *start < range.end)
    }
}

/// A tensor in flat arrays.
#[derive(Debug, Clone)]
pub(crate) struct Flat {
    lines: Arc<Lines>,
    /// Where its elements, or its parts, begin in a line.
    start: u64,
    n: u64,
    /// Elements of a part.
    part: u64,
}

/// Elements of a tensor that follow each other in one array.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    /// They, in row-major order.
    elements: Range<u64>,
    /// Where they begin in the array.
    at: u64,
    pub(crate) file: u32,
    /// The stored name of the array.
    pub(crate) name: &'a str,
    /// The shape of the array.
    pub(crate) shape: &'a [u64],
}

impl Flat {
    /// A tensor of a shape, from an element of the lines on.
    ///
    /// # Errors
    /// It is too large, or ends beyond the lines.
    pub(crate) fn new(lines: Arc<Lines>, start: u64, shape: &[u64]) -> Result<Self> {
        let n = n_elements(shape);
        let n = n.ok_or_else(|| Error::new(Kind::Argument, "the shape is too large"))?;
        let n_parts = lines.files_of_ranks().map_or(1, <[u32]>::len);
        let part = n.div_ceil(n_parts as u64);
        if start.checked_add(part).is_none_or(|end| end > lines.n()) {
            let message = format!("{part} elements from {start} on, of {}", lines.n());
            return Err(Error::new(Kind::Argument, message));
        }
        Ok(Self {
            lines,
            start,
            n,
            part,
        })
    }

    pub(crate) fn lines(&self) -> &Arc<Lines> {
        &self.lines
    }

    /// Whether no part has elements of two arrays.
    pub(crate) fn is_uncut(&self) -> bool {
        let range = self.start..self.start + self.part;
        range.is_empty() || self.lines.over(&range).len() == 1
    }

    /// All of it, in order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        self.pieces_over(0..self.n)
    }

    /// The pieces with elements of a range of the tensor, in order.
    pub(crate) fn pieces_over(&self, range: Range<u64>) -> impl Iterator<Item = Piece<'_>> {
        let parts = if range.is_empty() {
            0..0
        } else {
            range.start / self.part..range.end.div_ceil(self.part)
        };
        parts.flat_map(move |rank| {
            // Element 0 of the tensor would be here in the line.
            let first = rank * self.part;
            let in_line = |element: u64| element - first + self.start;
            let own = in_line(first)..in_line((first + self.part).min(self.n));
            let asked = in_line(range.start.max(first))..in_line(range.end).min(own.end);
            let arrays = self.lines.over(&asked).map(move |i| {
                let from = own.start.max(self.lines.starts[i]);
                let to = own.end.min(self.lines.starts[i + 1]);
                let element = |at: u64| first + (at - self.start);
                let (name, shape) = &self.lines.arrays[i];
                Piece {
                    elements: element(from)..element(to),
                    at: from - self.lines.starts[i],
                    file: self.lines.file(rank as usize, i),
                    name,
                    shape,
                }
            });
            arrays.filter(|piece| !piece.elements.is_empty())
        })
    }
}

impl Piece<'_> {
    /// Its boxes of a tensor of a shape.
    pub(crate) fn tiles(&self, shape: &[u64]) -> impl Iterator<Item = Tile> {
        let strides = row_major_strides(shape);
        let Range { start, end } = self.elements;
        let boxes = flat_range_boxes(shape, start, end).into_iter();
        boxes.map(move |global| Tile {
            local_offset: self.at + (element_of(global.offset(), &strides) - start),
            local_strides: strides.clone(),
            global,
        })
    }
}

/// The elements of a region that is not empty, from the first one to the last, in the row-major order of the tensor.
pub(crate) fn range_of(region: &Region, shape: &[u64]) -> Range<u64> {
    let strides = row_major_strides(shape);
    let last: Vec<u64> = (0..region.rank()).map(|d| region.end(d) - 1).collect();
    element_of(region.offset(), &strides)..element_of(&last, &strides) + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where each element of a tensor is stored: the file, the array and the element in it.
    fn places(flat: &Flat, shape: &[u64], range: Range<u64>) -> Vec<Option<(u32, String, u64)>> {
        let strides = row_major_strides(shape);
        let mut places = vec![None; shape.iter().product::<u64>() as usize];
        for piece in flat.pieces_over(range) {
            for tile in piece.tiles(shape) {
                let (offset, extents) = (tile.global.offset(), tile.global.shape());
                for mut i in 0..tile.global.n_elements() {
                    let mut index = offset.to_vec();
                    for d in (0..extents.len()).rev() {
                        index[d] += i % extents[d];
                        i /= extents[d];
                    }
                    let place = (piece.file, piece.name.to_owned(), tile.local_at(&index));
                    assert!(place.2 < piece.shape[0]);
                    let known = &mut places[element_of(&index, &strides) as usize];
                    assert_eq!(known.replace(place), None, "an element is in two tiles");
                }
            }
        }
        places
    }

    fn arrays() -> Vec<(String, u64)> {
        let sizes = [7, 0, 1, 30, 0, 62].into_iter().enumerate();
        sizes.map(|(i, n)| (i.to_string(), n)).collect()
    }

    /// The array of an element of a line, and the element in the array.
    fn in_line(mut at: u64) -> (String, u64) {
        for (name, n) in arrays() {
            if at < n {
                return (name, at);
            }
            at -= n;
        }
        panic!("beyond the line");
    }

    const SHAPES: [&[u64]; 7] = [&[], &[1], &[5], &[3, 4, 5], &[1, 9, 1], &[2, 0, 3], &[60]];

    #[test]
    fn each_element_of_a_line_is_found_where_it_is_stored() {
        let named = arrays().into_iter().zip(10..);
        let joined = named.map(|((name, n), file)| (file, name, n)).collect();
        let lines = Arc::new(Lines::joined(joined).unwrap());
        assert_eq!((lines.n(), lines.last_file()), (100, Some(15)));
        for shape in SHAPES {
            let n: u64 = shape.iter().product();
            for start in 0..=100 - n {
                let flat = Flat::new(Arc::clone(&lines), start, shape).unwrap();
                let expected = (start..start + n).map(|at| {
                    let (name, at) = in_line(at);
                    Some((10 + name.parse::<u32>().unwrap(), name, at))
                });
                assert_eq!(places(&flat, shape, 0..n), expected.collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn each_element_of_equal_parts_is_found_where_it_is_stored() {
        for n_ranks in 1..=9 {
            let files: Vec<u32> = (0..n_ranks).map(|rank| 50 - rank).collect();
            let lines = Arc::new(Lines::divided(files, arrays()).unwrap());
            for shape in SHAPES {
                let n: u64 = shape.iter().product();
                let part = n.div_ceil(u64::from(n_ranks));
                for start in [0, 3, 6, 7, 8, 30, 39, 100 - part] {
                    let flat = Flat::new(Arc::clone(&lines), start, shape).unwrap();
                    let expected = (0..n).map(|element| {
                        let (name, at) = in_line(start + element % part);
                        Some((50 - (element / part) as u32, name, at))
                    });
                    assert_eq!(places(&flat, shape, 0..n), expected.collect::<Vec<_>>());
                    let names = (start..start + part).map(|at| in_line(at).0);
                    let names: std::collections::HashSet<String> = names.collect();
                    assert_eq!(flat.is_uncut(), names.len() < 2, "{start} {part}");
                }
            }
        }
    }

    #[test]
    fn the_pieces_over_a_range_are_those_with_its_elements() {
        let lines = Arc::new(Lines::divided(vec![0, 1, 2, 3], arrays()).unwrap());
        let shape = [3, 4, 5];
        let flat = Flat::new(lines, 2, &shape).unwrap();
        let all: Vec<Range<u64>> = flat.pieces().map(|piece| piece.elements).collect();
        assert_eq!(all.len(), 4 * 3);
        for start in 0..60 {
            for end in start..=60 {
                let over =
                    |piece: &&Range<u64>| piece.start < end && start < piece.end && start < end;
                let expected: Vec<_> = all.iter().filter(over).cloned().collect();
                let found = flat.pieces_over(start..end).map(|piece| piece.elements);
                assert_eq!(found.collect::<Vec<_>>(), expected, "{start} to {end}");
            }
        }
        let region = Region::new(vec![0, 1, 2], vec![2, 3, 1]).unwrap();
        assert_eq!(range_of(&region, &shape), 7..38);
        assert_eq!(range_of(&Region::whole(&[]), &[]), 0..1);
    }

    #[test]
    fn what_does_not_lie_in_the_lines_is_refused() {
        let lines = Arc::new(Lines::divided(vec![0, 1], arrays()).unwrap());
        for (start, shape) in [
            (90, [3, 7]),
            (0, [1, 201]),
            (u64::MAX, [1, 1]),
            (0, [1 << 40, 1 << 40]),
        ] {
            let error = Flat::new(Arc::clone(&lines), start, &shape).unwrap_err();
            assert_eq!(error.kind(), Kind::Argument);
        }
        Flat::new(lines, 90, &[1, 20]).unwrap();
        assert!(Lines::divided(Vec::new(), arrays()).is_err());
        let large = vec![(0, String::new(), u64::MAX), (0, String::new(), 1)];
        assert!(Lines::joined(large).is_err());
    }
}
