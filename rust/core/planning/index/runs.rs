//! The plan of tensors that lie in safetensors files as a run of bytes, or as the cells of a grid: without geometry.

use super::planner::{Planning, cast_target, check_shape};
use super::table::{Found, Near};
use super::{CHUNK_TENSORS, Index};
use crate::bytes::strided::{CopyDims, Dim};
use crate::error::Result;
use crate::files::header::Entry;
use crate::files::shard_file::{ShardFile, Table};
use crate::files::source::closed;
use crate::geometry::dtype::Dtype;
use crate::geometry::region::{Region, row_major_strides};
use crate::planning::plan::{Array, CopyOp, CopyOps, Plan, strided_copy};
use crate::planning::request::{Request, WholeRequest};
use crate::planning::stored::{Form, Holders, choose, named};
use rayon::prelude::*;
use smallvec::smallvec;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The bytes of a tensor in one safetensors file, which are one run.
pub(super) struct FileRun {
    /// Number of the file among the sources of the plan.
    pub(super) source: u32,
    /// First byte of the tensor in the file.
    pub(super) start: u64,
    /// Stored and requested.
    pub(super) dtypes: (Dtype, Dtype),
    pub(super) shape: Vec<u64>,
}

impl FileRun {
    /// The array of all of it, which has elements.
    pub(super) fn array(self, name: &str) -> Result<Array> {
        let n = self.shape.iter().product();
        let run = Dim {
            len: n,
            src: 1,
            dst: 1,
        };
        let copy_op = CopyOp {
            source: self.source,
            src_start_bytes: self.start,
            dst: 0,
            dims: if n == 1 {
                CopyDims::new()
            } else {
                smallvec![run]
            },
        };
        Array::new(
            name.to_owned(),
            self.dtypes,
            &self.shape,
            smallvec![copy_op],
            Vec::new(),
        )
    }
}

/// The bytes of a tensor in a file that should hold it completely. `None`: it is no safetensors file, or its header says
/// otherwise. `next` is the number of the tensor that is looked for first, and `source` that of the file in the plan.
fn run_of(
    found: &Found<'_>,
    file: &ShardFile,
    next: &mut usize,
    source: u32,
    cast: Option<Dtype>,
) -> Result<Option<FileRun>> {
    let Table::Header(header) = &**file.table() else {
        return Ok(None);
    };
    let key = found.name();
    let Some(number) = header.find_near(key, *next) else {
        return Ok(None);
    };
    *next = number + 1;
    let Entry {
        dtype: stored,
        shape,
        start,
        ..
    } = header.entry(number);
    let expected = match found {
        Found::InWholeFile(_, entry) => entry.dtype,
        Found::Listed(listed) => *listed.dtype.get_or_init(|| stored),
    };
    if (stored, &shape[..]) != (expected, found.shape()) {
        return Ok(None);
    }
    let requested = cast_target(stored, cast).map_err(|error| error.key(key).within(named(key)))?;
    Ok(Some(FileRun {
        source,
        start: header.data_start() + start,
        dtypes: (stored, requested),
        shape,
    }))
}

/// A tensor in one safetensors file, of which boxes are read.
pub(super) struct BoxSource {
    /// Number of the file in the index.
    pub(super) file: u32,
    pub(super) bytes: FileRun,
    pub(super) unit_bytes: u64,
    pub(super) strides: Vec<u64>,
}

impl BoxSource {
    /// The array of a box, which is not empty.
    pub(super) fn array(&self, name: &str, held: &Region) -> Result<Array> {
        let src = held.offset().iter().zip(&self.strides);
        let src: u64 = src.map(|(at, stride)| at * stride).sum();
        let strides = row_major_strides(held.shape());
        let (_, dst, dims) = strided_copy(held, (src, &self.strides), (0, &strides));
        let copy_op = CopyOp {
            source: self.bytes.source,
            src_start_bytes: self.bytes.start + src * self.unit_bytes,
            dst,
            dims,
        };
        Array::new(
            name.to_owned(),
            self.bytes.dtypes,
            held.shape(),
            smallvec![copy_op],
            Vec::new(),
        )
    }
}

impl Index {
    /// Where boxes of a tensor are read that one safetensors file holds completely. `None`: it is not such a tensor, or
    /// there is something wrong with it, and [`Self::plan_array`] must plan its boxes.
    pub(super) fn box_source(
        &self,
        planning: &mut Planning,
        found: &Found<'_>,
    ) -> Result<Option<BoxSource>> {
        let Some(file) = found.only_file() else {
            return Ok(None);
        };
        let Some(bytes) = self.run_in(planning, found, file)? else {
            return Ok(None);
        };
        let (per_unit, unit_bytes) = bytes.dtypes.0.unit();
        let strides = row_major_strides(&bytes.shape);
        Ok((per_unit == 1).then_some(BoxSource {
            file,
            bytes,
            unit_bytes,
            strides,
        }))
    }

    /// The bytes of a tensor in a file that should hold it completely. `None`: it is no safetensors file, or its header
    /// says otherwise.
    fn run_in(
        &self,
        planning: &mut Planning,
        found: &Found<'_>,
        file: u32,
    ) -> Result<Option<FileRun>> {
        if planning.plan.verify && planning.opened[file as usize].is_none() {
            self.read_checksums([file], true)?;
        }
        let used = self.opened_for(planning, file)?;
        let (opened, mut next) = (Arc::clone(&used.file), used.next);
        let cast = self.cast_of(found.name(), planning.cast);
        let run = run_of(found, &opened, &mut next, 0, cast)?;
        if let Some(opened) = &mut planning.opened[file as usize] {
            opened.next = next;
        }
        Ok(run.map(|run| FileRun {
            source: planning.source(file),
            ..run
        }))
    }

    /// Most of 100,000 tensors lie in one file each, as one run: they need no geometry.
    pub(super) fn plan_whole(
        &self,
        request: &WholeRequest,
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        if request.len() > CHUNK_TENSORS
            && let Some(plan) = self.plan_runs(request, cast, verify)
        {
            return Ok(plan);
        }
        // Keys are checked first, so that no file is opened for an invalid request.
        let mut near = Near::default();
        let found = request.arrays().map(|(_, key, shape)| {
            let found = self.found_near(key, &mut near)?;
            check_shape(key, &found, shape)?;
            Ok(found)
        });
        let found = found.collect::<Result<Vec<_>>>()?;
        let mut planning = Planning::new(self.files.len(), cast, verify);
        planning.plan.arrays.reserve_exact(found.len());
        for ((name, key, shape), found) in request.arrays().zip(&found) {
            if !self.plan_one_run(&mut planning, name, found)?
                && !self.plan_cells(&mut planning, name, found)?
            {
                let mut request = Request::default();
                request.add_region(name, key, Region::whole(shape));
                self.plan_array(&mut planning, &request.arrays[0], Some(found))?;
            }
        }
        Ok(planning.plan)
    }

    /// The plan of many tensors, on all threads of the pool. Each is one run of bytes of one safetensors file, and none
    /// has replicas, among which one would be chosen. `None`: this is not so, or there is something wrong with one.
    fn plan_runs(
        &self,
        request: &WholeRequest,
        cast: Option<Dtype>,
        verify: bool,
    ) -> Option<Plan<'static>> {
        let n_chunks = request.len().div_ceil(CHUNK_TENSORS);
        let range = |i: usize| i * CHUNK_TENSORS..request.len().min((i + 1) * CHUNK_TENSORS);
        let find = |i: usize| {
            let (mut near, mut found) = (Near::default(), Vec::with_capacity(CHUNK_TENSORS));
            let mut files = Vec::new();
            for (_, key, shape) in request.arrays_in(range(i)) {
                let one = self.found_near(key, &mut near).ok()?;
                let &[file] = one.only_files()? else {
                    return None;
                };
                if one.shape() != shape || shape.contains(&0) {
                    return None;
                }
                if files.last() != Some(&file) {
                    files.push(file);
                }
                found.push((one, file));
            }
            Some((found, files))
        };
        let found: Option<Vec<_>> = (0..n_chunks).into_par_iter().map(find).collect();
        let found = found?;
        let mut planning = Planning::new(self.files.len(), cast, verify);
        for &file in found.iter().flat_map(|(_, files)| files) {
            if planning.opened[file as usize].is_none() {
                if verify {
                    self.read_checksums([file], true).ok()?;
                }
                self.opened_for(&mut planning, file).ok()?;
                planning.source(file);
            }
        }
        let plan = |(i, found): (usize, Vec<(Found<'_>, u32)>)| {
            let mut next = vec![0; self.files.len()];
            let arrays = request.arrays_in(range(i)).zip(found);
            let arrays = arrays.map(|((name, ..), (found, file))| {
                let opened = planning.opened[file as usize].as_ref()?;
                let next = &mut next[file as usize];
                let cast = self.cast_of(found.name(), cast);
                let bytes = run_of(&found, &opened.file, next, opened.source?, cast);
                bytes.ok()??.array(name).ok()
            });
            arrays.collect::<Option<Vec<Array>>>()
        };
        let found = found.into_iter().map(|(found, _)| found).enumerate();
        let chunks: Vec<_> = found.collect();
        let chunks: Option<Vec<_>> = chunks.into_par_iter().map(plan).collect();
        planning.plan.arrays = chunks?.into_iter().flatten().collect();
        Some(planning.plan)
    }

    /// Adds a tensor that is one run of bytes of one safetensors file. `false`: it is not, or there is something wrong
    /// with it, and [`Self::plan_array`] must plan it.
    fn plan_one_run(&self, planning: &mut Planning, name: &str, found: &Found<'_>) -> Result<bool> {
        let Some(files) = found.only_files() else {
            return Ok(false);
        };
        let n: u64 = found.shape().iter().product();
        if n == 0 {
            return Ok(false);
        }
        let Some(file) = choose(files, &mut planning.chosen, n) else {
            return Ok(false);
        };
        let Some(bytes) = self.run_in(planning, found, file)? else {
            return Ok(false);
        };
        let array = bytes.array(name)?;
        planning.plan.arrays.push(array);
        Ok(true)
    }

    /// Adds a tensor whose parts form a grid in safetensors files. `false` as of [`Self::plan_one_run`].
    fn plan_cells(&self, planning: &mut Planning, name: &str, found: &Found<'_>) -> Result<bool> {
        let Found::Listed(stored) = found else {
            return Ok(false);
        };
        let Form::Grid(grid) = &stored.form else {
            return Ok(false);
        };
        let is_listed = matches!(grid.holders, Holders::Cells(_));
        if is_listed || stored.only_cell().is_some() || stored.shape.contains(&0) {
            return Ok(false);
        }
        let Some(cells) = grid.select_all(&stored.shape, &mut planning.chosen) else {
            return Ok(false);
        };
        if planning.plan.verify {
            let files = cells.iter().map(|cell| cell.file);
            let new = files.filter(|&file| planning.opened[file as usize].is_none());
            self.read_checksums(new, true)?;
        }
        let mut copy_ops = CopyOps::with_capacity(cells.len());
        for cell in cells {
            let used = self.opened_for(planning, cell.file)?;
            let opened = Arc::clone(&used.file);
            let Table::Header(header) = &**opened.table() else {
                return Ok(false);
            };
            let Some(number) = used.find(&stored.key) else {
                return Ok(false);
            };
            let entry = header.entry(number);
            let dtype = *stored.dtype.get_or_init(|| entry.dtype);
            if (entry.dtype, &entry.shape) != (dtype, &cell.stored_shape) {
                return Ok(false);
            }
            copy_ops.push(CopyOp {
                source: planning.source(cell.file),
                src_start_bytes: header.data_start() + entry.start,
                dst: cell.dst,
                dims: cell.dims,
            });
        }
        let stored_dtype = self.dtype(stored)?;
        let dtype = cast_target(stored_dtype, self.cast_of(&stored.key, planning.cast))
            .map_err(|error| error.key(&stored.key).within(named(&stored.key)))?;
        let array = Array::new(
            name.to_owned(),
            (stored_dtype, dtype),
            &stored.shape,
            copy_ops,
            Vec::new(),
        )?;
        planning.plan.arrays.push(array);
        Ok(true)
    }
}
