//! Strided boxes: their geometry, and copies of them between two slices.

use crate::bytes::memory::{copy_run, prefetch};
use crate::error::Result;
use smallvec::SmallVec;

/// Shorter runs are not prefetched: they share pages.
pub(crate) const MIN_PREFETCHED_BYTES: usize = 256;
/// Prefetch distance of a copy of short runs, in bytes of runs. Of longer runs only the first lines would miss.
pub(crate) const PREFETCH_BYTES: usize = 8192;

/// One dim of a copy: the number of elements, and their strides on both sides, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dim {
    /// Number of elements.
    pub len: u64,
    /// Stride in the stored tensor.
    pub src: u64,
    /// Stride in the array.
    pub dst: u64,
}

/// The dims of a box. Most boxes are one run.
pub type CopyDims = SmallVec<[Dim; 1]>;

/// Elements from the first to the last element of a box in the array, both included.
pub(crate) fn dst_span(dims: &[Dim]) -> u64 {
    dims.iter().map(|dim| (dim.len - 1) * dim.dst).sum::<u64>() + 1
}

/// Elements from the first to the last element of a box in its source, both included.
pub(crate) fn src_span(dims: &[Dim]) -> u64 {
    dims.iter().map(|dim| (dim.len - 1) * dim.src).sum::<u64>() + 1
}

/// The dim with the largest stride in the source, and its number; `None` for a single element.
pub(crate) fn widest(dims: &[Dim]) -> Option<(usize, Dim)> {
    let dims = dims.iter().copied().enumerate();
    dims.filter(|(_, dim)| dim.len > 1)
        .max_by_key(|(_, dim)| dim.src)
}

/// All dims except one: a row of a box.
pub(crate) fn without(dims: &[Dim], at: usize) -> CopyDims {
    let mut row = CopyDims::from_slice(dims);
    row.remove(at);
    row
}

/// Drops dims of one element, sorts by descending stride in the array, and merges contiguous dims.
pub(crate) fn merge_dims(mut dims: CopyDims) -> CopyDims {
    dims.retain(|dim| dim.len != 1);
    if dims.len() < 2 {
        return dims;
    }
    dims.sort_by_key(|dim| std::cmp::Reverse(dim.dst));
    let mut merged = CopyDims::new();
    for dim in dims {
        match merged.last_mut() {
            Some(outer) if outer.src == dim.src * dim.len && outer.dst == dim.dst * dim.len => {
                *outer = Dim {
                    len: outer.len * dim.len,
                    ..dim
                };
            }
            _ => merged.push(dim),
        }
    }
    merged
}

/// The ranges of the array that a box covers, in order, each as its first element and one past its last.
pub(crate) fn dst_runs(dst: u64, dims: &[Dim]) -> Vec<(u64, u64)> {
    let mut by_stride = CopyDims::from_slice(dims);
    by_stride.sort_by_key(|dim| dim.dst);
    let (mut run, mut starts) = (1, vec![dst]);
    for dim in by_stride {
        if starts.len() == 1 && dim.dst == run {
            run *= dim.len;
        } else {
            let rows = |&start: &u64| (0..dim.len).map(move |row| start + row * dim.dst);
            starts = starts.iter().flat_map(rows).collect();
        }
    }
    starts.sort_unstable();
    starts
        .into_iter()
        .map(|start| (start, start + run))
        .collect()
}

/// Splits off the part of a strided box in `start..end` of the destination: `emit` gets dims, source and destination
/// offset of each box.
pub(crate) fn restrict(
    dims: &[Dim],
    src: u64,
    dst: u64,
    range: (u64, u64),
    emit: &mut impl FnMut(&[Dim], u64, u64) -> Result<()>,
) -> Result<()> {
    let (start, end) = range;
    if dst >= start && dst + dst_span(dims) <= end {
        return emit(dims, src, dst);
    }
    if dst >= end || dst + dst_span(dims) <= start {
        return Ok(());
    }
    let (outer, inner) = dims
        .split_first()
        .expect("a single element lies inside or outside");
    let inner_span = dst_span(inner);
    // Row k covers dst + k * outer.dst .. + inner_span. Rows do not overlap: at most one row is partial at each end.
    let first = (start + 1)
        .saturating_sub(dst + inner_span)
        .div_ceil(outer.dst);
    let whole_first = start.saturating_sub(dst).div_ceil(outer.dst);
    let last = (end - dst).div_ceil(outer.dst).min(outer.len);
    let whole_last = match (end - dst).checked_sub(inner_span) {
        Some(free) => (free / outer.dst + 1).min(outer.len),
        None => 0,
    };
    let at = |row: u64| (src + row * outer.src, dst + row * outer.dst);
    if whole_first < whole_last {
        for row in first..whole_first {
            restrict(inner, at(row).0, at(row).1, range, emit)?;
        }
        let mut rows = dims.to_vec();
        rows[0].len = whole_last - whole_first;
        emit(&rows, at(whole_first).0, at(whole_first).1)?;
        for row in whole_last..last {
            restrict(inner, at(row).0, at(row).1, range, emit)?;
        }
    } else {
        for row in first..last {
            restrict(inner, at(row).0, at(row).1, range, emit)?;
        }
    }
    Ok(())
}

/// Whether a box is one run on both sides, so that it can be read into its destination.
pub(crate) fn is_one_run(dims: &[Dim]) -> bool {
    match dims {
        [] => true,
        [dim] => dim.dst == 1 && source_run(dims) == dim.len,
        _ => false,
    }
}

/// Length of the longest run of a box in its source, in units.
pub(crate) fn source_run(dims: &[Dim]) -> u64 {
    let mut by_stride: Vec<&Dim> = dims.iter().collect();
    by_stride.sort_by_key(|dim| dim.src);
    by_stride.iter().fold(
        1,
        |run, dim| if dim.src == run { run * dim.len } else { run },
    )
}

/// Copies a strided box; both slices begin at its first element. With `streams` long runs use non-temporal stores.
pub(crate) fn copy_box(from: &[u8], to: &mut [u8], dims: &[Dim], unit_bytes: u64, streams: bool) {
    let (outer, run) = match dims.split_last() {
        Some((inner, outer)) if inner.src == 1 && inner.dst == 1 => (outer, inner.len),
        _ => (dims, 1),
    };
    let run_bytes = (run * unit_bytes) as usize;
    if run > 1 || outer.is_empty() {
        // Runs with gaps are prefetched.
        let step = outer
            .last()
            .map_or(0, |dim| (dim.src * unit_bytes) as usize);
        let is_prefetched =
            step > run_bytes && (MIN_PREFETCHED_BYTES..=PREFETCH_BYTES).contains(&run_bytes);
        let ahead = if is_prefetched {
            PREFETCH_BYTES / run_bytes * step
        } else {
            0
        };
        for_each_row(outer, unit_bytes, &mut |src, dst| {
            let later = src + ahead;
            if ahead > 0
                && let Some(later) = from.get(later..later + run_bytes)
            {
                prefetch(later);
            }
            copy_run(
                &mut to[dst..dst + run_bytes],
                &from[src..src + run_bytes],
                streams,
            );
        });
        return;
    }
    match unit_bytes {
        1 => copy_elements::<1>(from, to, outer),
        2 => copy_elements::<2>(from, to, outer),
        3 => copy_elements::<3>(from, to, outer),
        4 => copy_elements::<4>(from, to, outer),
        8 => copy_elements::<8>(from, to, outer),
        16 => copy_elements::<16>(from, to, outer),
        _ => for_each_row(outer, unit_bytes, &mut |src, dst| {
            to[dst..dst + run_bytes].copy_from_slice(&from[src..src + run_bytes]);
        }),
    }
}

/// Calls `row` with the byte offsets of every element of a box.
fn for_each_row(dims: &[Dim], unit_bytes: u64, row: &mut impl FnMut(usize, usize)) {
    for_each_row_from(dims, unit_bytes, (0, 0), row);
}

fn for_each_row_from(
    dims: &[Dim],
    unit_bytes: u64,
    (src, dst): (u64, u64),
    row: &mut impl FnMut(usize, usize),
) {
    let Some((dim, inner)) = dims.split_first() else {
        return row(src as usize, dst as usize);
    };
    let (src_step, dst_step) = (dim.src * unit_bytes, dim.dst * unit_bytes);
    if inner.is_empty() {
        for k in 0..dim.len {
            row((src + k * src_step) as usize, (dst + k * dst_step) as usize);
        }
    } else {
        for k in 0..dim.len {
            for_each_row_from(
                inner,
                unit_bytes,
                (src + k * src_step, dst + k * dst_step),
                row,
            );
        }
    }
}

/// Copies element by element, for permuted boxes. It iterates over squares of the dim that is dense in the source and
/// the dim that is dense in the destination, so that both sides are accessed by cache lines.
fn copy_elements<const N: usize>(from: &[u8], to: &mut [u8], dims: &[Dim]) {
    const SQUARE: u64 = 32;
    let mut outer = dims.to_vec();
    let row = outer.pop().expect("at least one dim");
    let column = outer
        .iter()
        .enumerate()
        .min_by_key(|(_, dim)| dim.src)
        .map(|(i, _)| i);
    let column = column.map_or(
        Dim {
            len: 1,
            src: 0,
            dst: 0,
        },
        |i| outer.remove(i),
    );
    let n = N as u64;
    for_each_row(&outer, n, &mut |src, dst| {
        for i0 in (0..column.len).step_by(SQUARE as usize) {
            for j0 in (0..row.len).step_by(SQUARE as usize) {
                for i in i0..(i0 + SQUARE).min(column.len) {
                    for j in j0..(j0 + SQUARE).min(row.len) {
                        let s = src + ((i * column.src + j * row.src) * n) as usize;
                        let d = dst + ((i * column.dst + j * row.dst) * n) as usize;
                        let element: [u8; N] = from[s..s + N].try_into().expect("N bytes");
                        to[d..d + N].copy_from_slice(&element);
                    }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_a_box_in_the_array_are_merged() {
        let dim = |len, dst| Dim { len, src: 9, dst };
        assert_eq!(dst_runs(5, &[]), [(5, 6)]);
        assert_eq!(dst_runs(5, &[dim(3, 4), dim(4, 1)]), [(5, 17)]);
        assert_eq!(
            dst_runs(5, &[dim(3, 10), dim(4, 1)]),
            [(5, 9), (15, 19), (25, 29)]
        );
        assert_eq!(
            dst_runs(0, &[dim(2, 100), dim(2, 10)]),
            [(0, 1), (10, 11), (100, 101), (110, 111)]
        );
    }

    #[test]
    fn restricted_boxes_cover_each_range_once() {
        let dims = [
            Dim {
                len: 3,
                src: 50,
                dst: 20,
            },
            Dim {
                len: 2,
                src: 7,
                dst: 6,
            },
            Dim {
                len: 4,
                src: 1,
                dst: 1,
            },
        ];
        let elements = |dims: &[Dim], src: u64, dst: u64| {
            let mut all = Vec::new();
            for_each_row(dims, 1, &mut |s, d| {
                all.push((dst + d as u64, src + s as u64));
            });
            all
        };
        let whole = elements(&dims, 3, 5);
        for start in 0..60 {
            for end in start + 1..62 {
                let mut found = Vec::new();
                restrict(&dims, 3, 5, (start, end), &mut |dims, src, dst| {
                    found.extend(elements(dims, src, dst));
                    Ok(())
                })
                .unwrap();
                let expected: Vec<_> = whole
                    .iter()
                    .copied()
                    .filter(|(d, _)| (start..end).contains(d))
                    .collect();
                assert_eq!(found, expected, "{start}..{end}");
            }
        }
    }
}
