//! Plans of stored arrays by their names in files, whatever tensors an index has.

use super::Index;
use super::planner::Planning;
use crate::bytes::strided::{CopyDims, Dim, merge_dims};
use crate::error::{Error, Kind, Result};
use crate::files::shard_file::ShardFile;
use crate::geometry::dtype::{Dtype, n_elements};
use crate::geometry::region::{Region, flat_range_boxes, row_major_strides};
use crate::planning::plan::{Array, CopyOp, CopyOps, Plan};
use crate::planning::stored::{named, strides_of_parts};
use std::ops::Range;
use std::sync::Arc;

/// A part of a stored array, in row-major order.
#[derive(Debug, Clone)]
pub struct Held {
    /// The number of its file.
    pub file: u32,
    /// The stored name.
    pub name: String,
    /// The shape of the stored array.
    pub stored_shape: Vec<u64>,
    /// The first element of the part in the stored array.
    pub start: u64,
    /// The shape of the part.
    pub shape: Vec<u64>,
    /// Elements of the stored array between neighbours, by dim.
    pub strides: Vec<u64>,
}

impl Index {
    /// A verified plan of ranges of parts, in elements, each as an array of one dim.
    ///
    /// # Errors
    /// A file cannot be opened or does not hold the array, or the part is not inside of it.
    pub(crate) fn plan_held(&self, ranges: &[(&Held, Dtype, Range<u64>)]) -> Result<Plan<'static>> {
        let files = || ranges.iter().map(|(held, ..)| held.file);
        let mut planning = Planning::new(self.n_files(), None, true);
        self.read_checksums(files(), true)?;
        self.open_listed(&planning, files());
        planning.plan.arrays.reserve_exact(ranges.len());
        for (held, dtype, range) in ranges {
            let used = self.opened_for(&mut planning, held.file)?;
            let file = Arc::clone(&used.file);
            let number = used.find(&held.name);
            let number = number.ok_or_else(|| self.missing_in(held.file, &held.name))?;
            let entry = file.table().entry(number);
            let (found, expected) = ((entry.dtype, &*entry.shape), (*dtype, &*held.stored_shape));
            self.check_stored(held.file, &held.name, found, expected)?;
            let start = file.table().data_start() + entry.start;
            let source = planning.source(held.file);
            let array = held.array(&file, *dtype, range, (source, start));
            let array = array.map_err(|error| error.key(&held.name).within(named(&held.name)))?;
            planning.plan.arrays.push(array);
        }
        Ok(planning.plan)
    }
}

impl Held {
    /// A range of its elements. `from` is the number of the source, and where the stored array begins in it.
    fn array(
        &self,
        file: &ShardFile,
        dtype: Dtype,
        range: &Range<u64>,
        from: (u32, u64),
    ) -> Result<Array> {
        let own = file.table().strides(&self.name);
        let strides = match own {
            Some(own) => strides_of_parts(&self.stored_shape, own, (self.start, &self.strides))?,
            None => &self.strides,
        };
        let mut last = self.shape.iter().zip(&self.strides);
        let last = last.try_fold(self.start, |at, (extent, stride)| {
            at.checked_add(extent.checked_sub(1)?.checked_mul(*stride)?)
        });
        let n_stored = n_elements(&self.stored_shape);
        let is_inside = last.zip(n_stored).is_some_and(|(last, n)| last < n)
            && (own.is_none() || Region::whole(&self.shape).lies_in(&self.stored_shape));
        if self.strides.len() != self.shape.len() || !is_inside {
            return Err(Error::damaged("a part of it is outside of it"));
        }
        let whole = 0..self.shape.iter().product();
        let boxes = if *range == whole {
            vec![Region::whole(&self.shape)]
        } else {
            flat_range_boxes(&self.shape, range.start, range.end)
        };
        let (per_unit, unit_bytes) = dtype.unit();
        let (mut copy_ops, mut dst) = (CopyOps::new(), 0);
        for one in boxes {
            let offset = one.offset().iter().zip(strides);
            let src = self.start + offset.map(|(at, stride)| at * stride).sum::<u64>();
            if !src.is_multiple_of(per_unit) {
                let message = format!("a part of it ({dtype}) does not begin at a byte boundary");
                return Err(Error::new(Kind::Unsupported, message));
            }
            let to = row_major_strides(one.shape());
            let dims = one.shape().iter().zip(strides).zip(to);
            let dims: CopyDims = dims
                .map(|((&len, &src), dst)| Dim { len, src, dst })
                .collect();
            copy_ops.push(CopyOp {
                source: from.0,
                src_start_bytes: from.1 + src / per_unit * unit_bytes,
                dst,
                dims: merge_dims(dims),
            });
            dst += one.n_elements();
        }
        let shape = [range.end - range.start];
        Array::new(String::new(), (dtype, dtype), &shape, copy_ops, Vec::new())
    }
}
