//! A reshard plan: the complete, checked list of what is copied from where to where.
//!
//! A plan is made of arrays, one for each local tensor that is wanted, and each array of copies: strided boxes that
//! lie in one stored tensor and in the array. Every element of an array is covered by exactly one copy or is padding.
//! Carrying it out can fail only by I/O.

use crate::dtype::{Dtype, n_elements};
use crate::error::{Error, Kind, Result};
use crate::region::{Region, row_major_strides};
use crate::shard_file::ShardFile;
use crate::strided::{Dim, dst_span, merge_dims};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A strided box in a source and in an array. Dims are sorted by falling `dst`; equal runs are merged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyOp {
    /// Which of the plan's sources.
    pub source: u32,
    /// Byte of the source at which its first element lies.
    pub src_start_bytes: u64,
    /// Element of the array at which it begins.
    pub dst: u64,
    /// Its dims.
    pub dims: Vec<Dim>,
}

impl CopyOp {
    /// One past its last element in the array.
    pub(crate) fn dst_end(&self) -> u64 {
        self.dst + dst_span(&self.dims)
    }
}

/// One wanted local tensor.
#[derive(Debug, Clone)]
pub struct Array {
    /// Its name.
    pub name: String,
    /// dtype in the sources.
    pub stored: Dtype,
    /// dtype wanted; differs from `stored` where a cast was asked for.
    pub dtype: Dtype,
    /// Its shape, in storage order, in elements.
    pub shape: Vec<u64>,
    /// Sorted by `dst`. Counted in units of [`Dtype::unit`] of `stored`.
    pub(crate) copy_ops: Vec<CopyOp>,
    /// Ranges that no copy covers, sorted, in units.
    pub(crate) padding: Vec<(u64, u64)>,
    /// Largest `dst_end` of the copies up to here: where a search for the first overlap begins.
    max_end: Vec<u64>,
    n_units: u64,
}

impl Array {
    /// An array of copies and padding, both counted in elements.
    pub fn new(
        name: String,
        (stored, dtype): (Dtype, Dtype),
        shape: Vec<u64>,
        mut copy_ops: Vec<CopyOp>,
        mut padding: Vec<(u64, u64)>,
    ) -> Result<Self> {
        let overflow = || Error::new(Kind::Argument, "the array has too many elements").key(&name);
        let n = n_elements(&shape).ok_or_else(overflow)?;
        let (per_unit, _) = stored.unit();
        if per_unit > 1 {
            let whole = n.is_multiple_of(per_unit)
                && padding
                    .iter()
                    .all(|(from, to)| from.is_multiple_of(per_unit) && to.is_multiple_of(per_unit))
                && copy_ops
                    .iter_mut()
                    .all(|copy_op| to_units(copy_op, per_unit));
            if !whole {
                let message = format!("a cut of `{name}` ({stored}) does not fall on whole bytes");
                return Err(Error::new(Kind::Unsupported, message)
                    .key(&name)
                    .hint(format!(
                        "cut the last dim at multiples of {per_unit} elements"
                    )));
            }
            for (from, to) in &mut padding {
                *from /= per_unit;
                *to /= per_unit;
            }
        }
        copy_ops.sort_by_key(|copy_op| copy_op.dst);
        let mut end = 0;
        let max_end = copy_ops
            .iter()
            .map(|copy_op| {
                end = end.max(copy_op.dst_end());
                end
            })
            .collect();
        Ok(Self {
            name,
            stored,
            dtype,
            shape,
            copy_ops,
            padding,
            max_end,
            n_units: n / per_unit,
        })
    }

    /// Units of the array: elements, but for dtypes narrower than a byte.
    pub fn n_units(&self) -> u64 {
        self.n_units
    }

    /// Bytes of one unit as wanted.
    pub fn unit_bytes(&self) -> u64 {
        self.dtype.unit().1
    }

    /// Bytes of the array.
    pub fn n_bytes(&self) -> u64 {
        self.n_units * self.unit_bytes()
    }

    /// The copies that may touch `start..end`.
    pub(crate) fn copy_ops_over(&self, start: u64, end: u64) -> &[CopyOp] {
        let first = self.max_end.partition_point(|e| *e <= start);
        let last = self.copy_ops.partition_point(|copy_op| copy_op.dst < end);
        self.copy_ops.get(first..last).unwrap_or(&[])
    }

    /// The one copy, if the array lies in a source just as it is wanted.
    pub fn contiguous(&self) -> Option<&CopyOp> {
        match self.copy_ops.as_slice() {
            [copy_op] if self.padding.is_empty() && self.stored == self.dtype => {
                let whole = match copy_op.dims.as_slice() {
                    [] => self.n_units == 1,
                    [dim] => (dim.src, dim.dst, dim.len) == (1, 1, self.n_units),
                    _ => false,
                };
                whole.then_some(copy_op)
            }
            _ => None,
        }
    }
}

/// Recounts a copy of a sub-byte dtype in whole-byte units; false if it does not fall on them.
fn to_units(copy_op: &mut CopyOp, per_unit: u64) -> bool {
    if !copy_op.dst.is_multiple_of(per_unit) {
        return false;
    }
    copy_op.dst /= per_unit;
    let mut inner = false;
    for dim in &mut copy_op.dims {
        if dim.src == 1 && dim.dst == 1 && dim.len.is_multiple_of(per_unit) {
            dim.len /= per_unit;
            inner = true;
        } else if dim.src.is_multiple_of(per_unit) && dim.dst.is_multiple_of(per_unit) {
            dim.src /= per_unit;
            dim.dst /= per_unit;
        } else {
            return false;
        }
    }
    inner
}

/// Where a copy's bytes lie.
#[derive(Debug, Clone)]
pub enum PlanSource<'a> {
    /// A shard file, and its number in the index.
    File(u32, Arc<ShardFile>),
    /// Memory of the caller.
    Memory(&'a [u8]),
}

/// A tensor in memory of the caller.
#[derive(Debug)]
pub struct MemoryTensor<'a> {
    /// Its name.
    pub name: String,
    /// Its dtype.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Everything from its first element to its last.
    pub bytes: &'a [u8],
    /// Bytes between neighbours, one entry a dim; of a dtype narrower than a byte they play no part.
    pub strides_bytes: Vec<u64>,
}

/// Arrays and the sources of their copies.
#[derive(Debug, Default)]
pub struct Plan<'a> {
    pub(crate) arrays: Vec<Array>,
    pub(crate) sources: Vec<PlanSource<'a>>,
    /// Whether chunks are compared with their sums, where sums are known.
    pub(crate) verify: bool,
}

impl<'a> Plan<'a> {
    /// The arrays, in the order of the request.
    pub fn arrays(&self) -> &[Array] {
        &self.arrays
    }

    /// The source of a copy.
    pub fn source(&self, copy_op: &CopyOp) -> &PlanSource<'a> {
        &self.sources[copy_op.source as usize]
    }

    /// The plan of some of the arrays, by number.
    pub fn only(&self, arrays: &[usize]) -> Result<Self> {
        let pick = |i: &usize| {
            self.arrays
                .get(*i)
                .cloned()
                .ok_or_else(|| Error::new(Kind::Argument, format!("no array {i}")))
        };
        Ok(Self {
            arrays: arrays.iter().map(pick).collect::<Result<_>>()?,
            sources: self.sources.clone(),
            verify: self.verify,
        })
    }

    /// Bytes of all arrays.
    pub fn n_bytes(&self) -> u64 {
        self.arrays.iter().map(Array::n_bytes).sum()
    }

    /// Number of copies.
    pub fn n_copy_ops(&self) -> usize {
        self.arrays.iter().map(|array| array.copy_ops.len()).sum()
    }

    /// Bytes wanted of each file, by its number in the index.
    pub fn source_bytes(&self) -> BTreeMap<u32, u64> {
        let mut bytes = BTreeMap::new();
        for array in &self.arrays {
            for copy_op in &array.copy_ops {
                if let PlanSource::File(id, _) = self.source(copy_op) {
                    let n: u64 = copy_op.dims.iter().map(|dim| dim.len).product();
                    *bytes.entry(*id).or_default() += n * array.stored.unit().1;
                }
            }
        }
        bytes
    }

    /// A plan over memory of the caller: one array a buffer, in order.
    ///
    pub fn of_memory(tensors: Vec<MemoryTensor<'a>>) -> Result<Self> {
        let mut plan = Plan::default();
        for tensor in tensors {
            let MemoryTensor {
                name,
                dtype,
                shape,
                bytes,
                strides_bytes,
            } = tensor;
            let bad = |what: &str| {
                Error::new(Kind::Argument, format!("the buffer of `{name}` {what}")).key(&name)
            };
            let (per_unit, unit_bytes) = dtype.unit();
            let n_bytes = dtype
                .n_bytes(&shape)
                .ok_or_else(|| bad("has no whole number of bytes"))?;
            let contiguous = row_major_strides(&shape);
            let is_contiguous = per_unit > 1
                || shape.iter().enumerate().all(|(d, len)| {
                    *len == 1 || strides_bytes.get(d) == Some(&(contiguous[d] * unit_bytes))
                });
            let mut copy_ops = Vec::new();
            if n_bytes > 0 {
                let dims = if is_contiguous {
                    vec![Dim {
                        len: n_elements(&shape).expect("counted above"),
                        src: 1,
                        dst: 1,
                    }]
                } else {
                    let dims = (0..shape.len()).map(|d| {
                        let stride = strides_bytes
                            .get(d)
                            .copied()
                            .filter(|s| s.is_multiple_of(unit_bytes));
                        stride.map(|stride| Dim {
                            len: shape[d],
                            src: stride / unit_bytes,
                            dst: contiguous[d],
                        })
                    });
                    dims.collect::<Option<Vec<_>>>()
                        .ok_or_else(|| bad("has strides that are no multiples of its elements"))?
                };
                let span = if is_contiguous {
                    Some(n_bytes)
                } else {
                    checked_span(&dims).and_then(|s| s.checked_mul(unit_bytes))
                };
                if span.is_none_or(|span| span > bytes.len() as u64) {
                    return Err(bad(&format!(
                        "has {} bytes, its shape and strides ask for more",
                        bytes.len()
                    )));
                }
                copy_ops.push(CopyOp {
                    source: plan.sources.len() as u32,
                    src_start_bytes: 0,
                    dst: 0,
                    dims: merge_dims(dims),
                });
            }
            plan.arrays.push(Array::new(
                name,
                (dtype, dtype),
                shape,
                copy_ops,
                Vec::new(),
            )?);
            plan.sources.push(PlanSource::Memory(bytes));
        }
        Ok(plan)
    }
}

fn checked_span(dims: &[Dim]) -> Option<u64> {
    dims.iter().try_fold(1_u64, |span, dim| {
        span.checked_add((dim.len - 1).checked_mul(dim.src)?)
    })
}

/// A copy from a box that lies in both sides: element offsets and strides, one stride a dim.
pub(crate) fn strided_copy(
    common: &Region,
    (src, src_strides): (u64, &[u64]),
    (dst, dst_strides): (u64, &[u64]),
) -> (u64, u64, Vec<Dim>) {
    let dims = (0..common.rank())
        .map(|d| Dim {
            len: common.shape()[d],
            src: src_strides[d],
            dst: dst_strides[d],
        })
        .collect();
    (src, dst, merge_dims(dims))
}
