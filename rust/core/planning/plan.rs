//! A reshard plan: the checked list of all copies from stored to requested tensors.
//!
//! A plan consists of arrays, one per requested local tensor. An array consists of copies: strided boxes of a stored
//! tensor and of the array. Exactly one copy covers each element of an array, or the element is padding. Execution
//! fails only for I/O errors, damage and cancellation.

use crate::bytes::strided::{CopyDims, Dim, dst_span, merge_dims};
use crate::error::{Error, Kind, Result};
use crate::files::shard_file::ShardFile;
use crate::geometry::dtype::{Dtype, n_elements};
use crate::geometry::region::{Region, row_major_strides};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A strided box in a source and in an array. Dims are sorted by descending `dst`; contiguous dims are merged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyOp {
    /// Number of the source in the plan.
    pub source: u32,
    /// First byte of the box in the source.
    pub src_start_bytes: u64,
    /// First element of the box in the array.
    pub dst: u64,
    /// The dims of the box.
    pub dims: CopyDims,
}

impl CopyOp {
    /// One past the last element of the box in the array.
    pub(crate) fn dst_end(&self) -> u64 {
        self.dst + dst_span(&self.dims)
    }
}

/// The copies of an array. Most arrays are one box.
pub type CopyOps = SmallVec<[CopyOp; 1]>;

/// One requested local tensor.
#[derive(Debug, Clone)]
pub struct Array {
    /// Its name.
    pub name: String,
    /// dtype in the sources.
    pub stored: Dtype,
    /// Requested dtype; it differs from `stored` if the array is cast.
    pub dtype: Dtype,
    /// Its shape, in storage order, in elements.
    pub shape: SmallVec<[u64; 4]>,
    /// Sorted by `dst`, in units of [`Dtype::unit`] of `stored`.
    pub(crate) copy_ops: CopyOps,
    /// Ranges that no copy covers, sorted, in units.
    pub(crate) padding: Vec<(u64, u64)>,
    /// For each copy the largest `dst_end` of all copies up to it, for the search of the first overlap; empty for one.
    max_end: Vec<u64>,
    n_units: u64,
}

impl Array {
    /// Creates an array from copies and padding, both in elements.
    pub fn new(
        name: String,
        (stored, dtype): (Dtype, Dtype),
        shape: &[u64],
        mut copy_ops: CopyOps,
        mut padding: Vec<(u64, u64)>,
    ) -> Result<Self> {
        let overflow = || Error::new(Kind::Argument, "the array has too many elements").key(&name);
        let n = n_elements(shape).ok_or_else(overflow)?;
        let (per_unit, unit_bytes) = stored.unit();
        // No array in memory is longer. Sums and products below do not overflow.
        let most_bytes = (n / per_unit).checked_mul(unit_bytes.max(dtype.unit().1));
        if most_bytes.is_none_or(|n_bytes| i64::try_from(n_bytes).is_err()) {
            return Err(overflow());
        }
        if per_unit > 1 {
            let whole = n.is_multiple_of(per_unit)
                && padding
                    .iter()
                    .all(|(from, to)| from.is_multiple_of(per_unit) && to.is_multiple_of(per_unit))
                && copy_ops
                    .iter_mut()
                    .all(|copy_op| to_units(copy_op, per_unit));
            if !whole {
                let message = format!(
                    "a shard of `{name}` ({stored}) does not begin or end at a byte boundary"
                );
                return Err(Error::new(Kind::Unsupported, message)
                    .key(&name)
                    .hint(format!(
                        "split the last dim at multiples of {per_unit} elements"
                    )));
            }
            for (from, to) in &mut padding {
                *from /= per_unit;
                *to /= per_unit;
            }
        }
        copy_ops.sort_by_key(|copy_op| copy_op.dst);
        let mut end = 0;
        let max_ends = copy_ops.iter().map(|copy_op| {
            end = end.max(copy_op.dst_end());
            end
        });
        let max_end = if copy_ops.len() > 1 {
            max_ends.collect()
        } else {
            Vec::new()
        };
        Ok(Self {
            name,
            stored,
            dtype,
            shape: SmallVec::from_slice(shape),
            copy_ops,
            padding,
            max_end,
            n_units: n / per_unit,
        })
    }

    /// Number of units; a unit is one element, except for dtypes narrower than a byte.
    pub fn n_units(&self) -> u64 {
        self.n_units
    }

    /// Bytes of one unit in the requested dtype.
    pub fn unit_bytes(&self) -> u64 {
        self.dtype.unit().1
    }

    /// Bytes of the array.
    pub fn n_bytes(&self) -> u64 {
        self.n_units * self.unit_bytes()
    }

    /// The copies that may overlap `start..end`, in units.
    pub(crate) fn copy_ops_over(&self, start: u64, end: u64) -> &[CopyOp] {
        let first = match self.copy_ops.as_slice() {
            [only] => usize::from(only.dst_end() <= start),
            _ => self.max_end.partition_point(|e| *e <= start),
        };
        let last = self.copy_ops.partition_point(|copy_op| copy_op.dst < end);
        self.copy_ops.get(first..last).unwrap_or(&[])
    }

    /// Makes an array that is [`Self::contiguous`] one of bytes, and adds the bytes behind it in its source.
    pub(crate) fn lengthen_run(&mut self, n_bytes: u64) {
        let n = self.n_bytes() + n_bytes;
        (self.stored, self.dtype, self.n_units) = (Dtype::U8, Dtype::U8, n);
        self.shape.clear();
        self.shape.push(n);
        let dims = &mut self.copy_ops[0].dims;
        dims.clear();
        dims.push(Dim {
            len: n,
            src: 1,
            dst: 1,
        });
    }

    /// The only copy, if the array is stored in a source contiguously and in the requested dtype.
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

/// Converts a copy of a sub-byte dtype to units of complete bytes; false if that is not possible.
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

/// The source of a copy.
#[derive(Debug, Clone)]
pub enum PlanSource<'a> {
    /// Number of a shard file in the index, and the file.
    File(u32, Arc<ShardFile>),
    /// Memory of the caller.
    Memory(&'a [u8]),
}

/// A tensor in memory of the caller.
#[derive(Debug)]
pub struct MemoryTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its dtype.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: &'a [u64],
    /// All bytes from its first to its last element.
    pub bytes: &'a [u8],
    /// Strides in bytes, one per dim; empty if it is row-major, as those of dtypes narrower than a byte must be.
    pub strides_bytes: Vec<u64>,
}

/// Arrays and the sources of their copies.
#[derive(Debug, Default)]
pub struct Plan<'a> {
    pub(crate) arrays: Vec<Array>,
    pub(crate) sources: Vec<PlanSource<'a>>,
    /// Whether chunks are compared with their checksums, for files with checksums.
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
                .ok_or_else(|| Error::new(Kind::Argument, format!("there is no array {i}")))
        };
        Ok(Self {
            arrays: arrays.iter().map(pick).collect::<Result<_>>()?,
            sources: self.sources.clone(),
            verify: self.verify,
        })
    }

    /// Bytes of all arrays.
    pub fn n_bytes(&self) -> u64 {
        let sizes = self.arrays.iter().map(Array::n_bytes);
        sizes.fold(0, u64::saturating_add)
    }

    /// Number of copies.
    pub fn n_copy_ops(&self) -> usize {
        self.arrays.iter().map(|array| array.copy_ops.len()).sum()
    }

    /// Bytes that are copied from each file, by its number in the index.
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

    /// Creates a plan over memory of the caller: one array per tensor, in order.
    ///
    /// # Errors
    /// The bytes or strides of a tensor do not match its shape.
    pub fn of_memory(tensors: impl IntoIterator<Item = MemoryTensor<'a>>) -> Result<Self> {
        let tensors = tensors.into_iter();
        let mut plan = Self::default();
        plan.arrays.reserve_exact(tensors.size_hint().0);
        plan.sources.reserve_exact(tensors.size_hint().0);
        for (number, tensor) in tensors.enumerate() {
            plan.sources.push(PlanSource::Memory(tensor.bytes));
            plan.arrays.push(tensor.planned(number)?);
        }
        Ok(plan)
    }
}

impl MemoryTensor<'_> {
    /// The array of this tensor, whose bytes are the source with this number.
    fn planned(self, number: usize) -> Result<Array> {
        let MemoryTensor {
            name,
            dtype,
            shape,
            bytes,
            strides_bytes,
        } = self;
        let bad = |what: &str| {
            Error::new(Kind::Argument, format!("the buffer of `{name}` {what}")).key(name)
        };
        let (per_unit, unit_bytes) = dtype.unit();
        let n_bytes = dtype
            .n_bytes(shape)
            .ok_or_else(|| bad("does not have an integer number of bytes"))?;
        if per_unit > 1 && !strides_bytes.is_empty() {
            return Err(bad("has strides, and its dtype is narrower than a byte"));
        }
        let is_contiguous = n_bytes == 0
            || strides_bytes.is_empty()
            || is_row_major(shape, &strides_bytes, unit_bytes);
        let mut copy_ops = CopyOps::new();
        if n_bytes > 0 {
            let dims = if is_contiguous {
                smallvec![Dim {
                    len: n_elements(shape).expect("counted above"),
                    src: 1,
                    dst: 1,
                }]
            } else {
                let contiguous = row_major_strides(shape);
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
                dims.collect::<Option<CopyDims>>()
                    .ok_or_else(|| bad("has strides that are not multiples of the element size"))?
            };
            let span = if is_contiguous {
                Some(n_bytes)
            } else {
                checked_span(&dims).and_then(|s| s.checked_mul(unit_bytes))
            };
            if span.is_none_or(|span| span > bytes.len() as u64) {
                return Err(bad(&format!(
                    "has {} bytes, its shape and strides require more",
                    bytes.len()
                )));
            }
            copy_ops.push(CopyOp {
                source: number as u32,
                src_start_bytes: 0,
                dst: 0,
                dims: merge_dims(dims),
            });
        }
        Array::new(name.to_owned(), (dtype, dtype), shape, copy_ops, Vec::new())
    }
}

/// Whether memory that has elements is contiguous in row-major order.
fn is_row_major(shape: &[u64], strides_bytes: &[u64], unit_bytes: u64) -> bool {
    let mut expected = unit_bytes;
    shape.iter().enumerate().rev().all(|(d, len)| {
        let is_next = *len == 1 || strides_bytes.get(d) == Some(&expected);
        expected *= len;
        is_next
    })
}

fn checked_span(dims: &[Dim]) -> Option<u64> {
    dims.iter().try_fold(1_u64, |span, dim| {
        span.checked_add((dim.len - 1).checked_mul(dim.src)?)
    })
}

/// Source offset, destination offset and dims of the copy of a region; both sides have an offset and one stride per
/// dim.
pub(crate) fn strided_copy(
    common: &Region,
    (src, src_strides): (u64, &[u64]),
    (dst, dst_strides): (u64, &[u64]),
) -> (u64, u64, CopyDims) {
    let dims = (0..common.rank())
        .map(|d| Dim {
            len: common.shape()[d],
            src: src_strides[d],
            dst: dst_strides[d],
        })
        .collect();
    (src, dst, merge_dims(dims))
}
