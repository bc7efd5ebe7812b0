//! The plan of a request: which stored bytes are copied where.

use super::Index;
use super::files::FileSlot;
use super::table::{Found, Near};
use crate::bytes::cast::can_cast;
use crate::bytes::strided::dst_runs;
use crate::error::{Error, Kind, Printable, Result};
use crate::files::shard_file::{Format, ShardFile};
use crate::files::source::closed;
use crate::geometry::dtype::Dtype;
use crate::geometry::layout::Layout;
use crate::geometry::region::Dims;
use crate::planning::plan::{Array, CopyOps, Plan, PlanSource};
use crate::planning::request::{RankRequest, Request, Requested, RequestedArray, WholeRequest};
use crate::planning::stored::{
    Form, Grid, SelectedCopy, ZEROS, named, select_divided, select_flat, select_whole,
};
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A plan that is being made.
pub(super) struct Planning {
    pub(super) plan: Plan<'static>,
    pub(super) cast: Option<Dtype>,
    /// The elements that are copied from each file.
    pub(super) chosen: Vec<u64>,
    /// By number in the index, the files that were used.
    pub(super) opened: Vec<Option<OpenedFile>>,
}

/// A file that a plan uses.
pub(super) struct OpenedFile {
    pub(super) file: Arc<ShardFile>,
    /// The number after that of the tensor that was found last: tensors are often requested in the order of the file.
    pub(super) next: usize,
    /// Its number among the sources of the plan.
    pub(super) source: Option<u32>,
}

impl OpenedFile {
    /// The number of a stored tensor.
    pub(super) fn find(&mut self, name: &str) -> Option<usize> {
        let found = self.file.table().find_near(name, self.next)?;
        self.next = found + 1;
        Some(found)
    }
}

impl Planning {
    pub(super) fn new(n_files: usize, cast: Option<Dtype>, verify: bool) -> Self {
        let plan = Plan {
            verify,
            ..Plan::default()
        };
        Self {
            plan,
            cast,
            chosen: vec![0; n_files],
            opened: (0..n_files).map(|_| None).collect(),
        }
    }

    /// The number of an opened file among the sources of the plan.
    pub(super) fn source(&mut self, file: u32) -> u32 {
        let opened = self.opened[file as usize].as_mut().expect("opened before");
        *opened.source.get_or_insert_with(|| {
            let source = PlanSource::File(file, Arc::clone(&opened.file));
            self.plan.sources.push(source);
            self.plan.sources.len() as u32 - 1
        })
    }
}

impl Index {
    /// Lets no plan cast these tensors, whatever dtype is requested. Keys that the index does not have are ignored.
    pub fn keep_dtypes(&mut self, keys: impl IntoIterator<Item = Box<str>>) {
        self.uncast.extend(keys);
    }

    /// The dtype to which a tensor is cast, if `cast` is requested.
    pub(super) fn cast_of(&self, key: &str, cast: Option<Dtype>) -> Option<Dtype> {
        cast.filter(|_| self.uncast.is_empty() || !self.uncast.contains(key))
    }

    /// As [`Self::plan`].
    pub fn plan_requested(
        &self,
        requested: &Requested,
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        let of_rank = match requested {
            Requested::Whole(request) => return self.plan_whole(request, cast, verify),
            Requested::OfRank(request) => request.whole(),
            Requested::Listed(_) => None,
        };
        match of_rank {
            Some(request) => self.plan_whole(&request, cast, verify),
            None => self.plan(&*requested.request()?, cast, verify),
        }
    }

    /// Plans the copies of a request and checks them. With `cast`, floating-point tensors are cast to that dtype;
    /// others are not. With `verify`, execution compares every chunk that it reads with its checksum, for files with
    /// checksums.
    pub fn plan(
        &self,
        request: &Request,
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        self.plan_together(&[Cow::Borrowed(request)], cast, verify)
    }

    /// One plan of several requests, with their arrays one after the other. See [`Self::plan`].
    pub fn plan_together(
        &self,
        requests: &[Cow<'_, Request>],
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        let arrays = || requests.iter().flat_map(|request| &request.arrays);
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        // Keys and shapes are checked first, so that no file is opened for an invalid request.
        let found = arrays()
            .map(|requested| self.check_requested(requested))
            .collect::<Result<Vec<_>>>()?;
        let mut planning = Planning::new(self.files.len(), cast, verify);
        for (requested, found) in arrays().zip(&found) {
            self.plan_array(&mut planning, requested, found.as_ref())?;
        }
        Ok(planning.plan)
    }

    /// One plan of the requests of several files, as [`Self::plan_together`] makes it. If they are those of ranks for the
    /// same keys, what does not depend on the rank is done once.
    pub(crate) fn plan_files(
        &self,
        requests: &[&Requested],
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        let of_ranks = requests.iter().map(|requested| match requested {
            Requested::OfRank(request) => Some(request),
            Requested::Listed(_) | Requested::Whole(_) => None,
        });
        if let Some(of_ranks) = of_ranks.collect::<Option<Vec<_>>>()
            && let Some(first) = of_ranks.first()
            && of_ranks
                .iter()
                .all(|request| Arc::ptr_eq(request.keys(), first.keys()))
        {
            return self.plan_ranks(first.keys(), &of_ranks, cast, verify);
        }
        let requests = requests.iter().map(|requested| requested.request());
        self.plan_together(&requests.collect::<Result<Vec<_>>>()?, cast, verify)
    }

    fn plan_ranks(
        &self,
        keys: &[(String, Arc<Layout>)],
        requests: &[&RankRequest],
        cast: Option<Dtype>,
        verify: bool,
    ) -> Result<Plan<'static>> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(closed());
        }
        let mut near = Near::default();
        let found = keys.iter().map(|(key, layout)| {
            let found = self.found_near(key, &mut near)?;
            check_shape(key, &found, layout.shape())?;
            Ok(found)
        });
        let found = found.collect::<Result<Vec<_>>>()?;
        let mut planning = Planning::new(self.files.len(), cast, verify);
        let sources = found
            .iter()
            .map(|found| self.box_source(&mut planning, found));
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let n_arrays = keys.len() * requests.len();
        planning.plan.arrays.reserve_exact(n_arrays);
        for rank in requests.iter().map(|request| request.rank()) {
            for (((key, layout), found), source) in keys.iter().zip(&found).zip(&sources) {
                let position = layout.mesh().position(rank)?;
                let held = layout.only_box(position).filter(|_| layout.holds(position));
                if let (Some(source), Some(held)) = (source, held) {
                    planning.chosen[source.file as usize] += held.n_elements();
                    planning.plan.arrays.push(source.array(key, &held)?);
                    continue;
                }
                let mut request = Request::default();
                request.add(key, key, layout, position)?;
                self.plan_array(&mut planning, &request.arrays[0], Some(found))?;
            }
        }
        Ok(planning.plan)
    }

    /// A file, opened when it is first used.
    pub(super) fn opened_for<'p>(
        &self,
        planning: &'p mut Planning,
        file: u32,
    ) -> Result<&'p mut OpenedFile> {
        let slot = &mut planning.opened[file as usize];
        if slot.is_none() {
            *slot = Some(OpenedFile {
                file: self.open(file)?,
                next: 0,
                source: None,
            });
        }
        Ok(slot.as_mut().expect("opened above"))
    }

    /// Opens files whose tables their readers make, several at once: that can take long. One that cannot be opened is opened
    /// again where it is used, which says why.
    pub(super) fn open_listed(&self, planning: &Planning, files: impl Iterator<Item = u32>) {
        let is_new = |file: &u32| {
            let is_listed = |slot: &FileSlot| matches!(slot.format, Format::Listed(_));
            planning.opened[*file as usize].is_none() && self.slot(*file).is_ok_and(is_listed)
        };
        let mut new: Vec<u32> = files.filter(is_new).collect();
        new.sort_unstable();
        new.dedup();
        if new.len() > 1 {
            new.par_iter().for_each(|file| drop(self.open(*file)));
        }
    }

    /// Plans one array of a request. `found` is the tensor of all its tiles, if there is one.
    pub(super) fn plan_array(
        &self,
        planning: &mut Planning,
        requested: &RequestedArray,
        found: Option<&Found<'_>>,
    ) -> Result<()> {
        let (first_key, _) = &requested.keys[0];
        let mut selected = self.select(requested, found, &mut planning.chosen)?;
        let mut padding = requested.padding.clone();
        if selected.iter().any(|one| one.file == ZEROS) {
            selected.retain(|one| {
                if one.file == ZEROS {
                    padding.extend(dst_runs(one.copy_op.dst, &one.copy_op.dims));
                }
                one.file != ZEROS
            });
            padding.sort_unstable();
        }
        if planning.plan.verify {
            let files = selected.iter().map(|one| one.file);
            let new = files.filter(|&file| planning.opened[file as usize].is_none());
            self.read_checksums(new, true)?;
        }
        self.open_listed(planning, selected.iter().map(|one| one.file));
        let stored_dtype = match found {
            Some(Found::InWholeFile(_, entry)) => entry.dtype,
            Some(Found::Listed(stored)) if stored.dtype.get().is_some() => self.dtype(stored)?,
            _ => {
                let keys = requested.keys.iter().map(|(key, _)| key.as_str());
                let keys: HashSet<&str> = keys.collect();
                for one in selected.iter().filter(|one| keys.contains(&*one.name)) {
                    self.set_dtype_from_file(one)?;
                }
                self.dtype_of(first_key)?
            }
        };
        for (key, _) in &requested.keys[1..] {
            let dtype = self.dtype_of(key)?;
            if dtype != stored_dtype {
                let message = format!(
                    "`{}` joins {} of {stored_dtype} and {} of {dtype}; expected the same dtype",
                    Printable(&requested.name),
                    named(first_key),
                    named(key),
                );
                return Err(Error::new(Kind::Mismatch, message).key(key));
            }
        }
        let dtype = cast_target(stored_dtype, self.cast_of(first_key, planning.cast))
            .map_err(|error| error.key(first_key).within(named(first_key)))?;
        let mut copy_ops = CopyOps::new();
        for one in selected {
            let SelectedCopy {
                file,
                name,
                stored_shape,
                mut src,
                mut copy_op,
                boxes,
            } = one;
            let name = &*name;
            let used = self.opened_for(planning, file)?;
            let opened = Arc::clone(&used.file);
            let table = opened.table();
            if let Some(strides) = table.strides(name) {
                let boxes = boxes.expect("a safetensors file has no strides");
                let strided = boxes.strided(&stored_shape, strides);
                (src, copy_op.dims) =
                    strided.map_err(|error| error.key(name).within(named(name)))?;
            }
            let number = used.find(name);
            let entry = table.entry(number.ok_or_else(|| self.missing_in(file, name))?);
            let (found, start) = (entry.dtype, table.data_start() + entry.start);
            self.check_stored(
                file,
                name,
                (found, &entry.shape),
                (stored_dtype, &stored_shape),
            )?;
            copy_op.source = planning.source(file);
            let (per_unit, unit_bytes) = stored_dtype.unit();
            if !src.is_multiple_of(per_unit) {
                let message = format!(
                    "a shard of {} ({stored_dtype}) does not begin or end at a byte boundary",
                    named(name)
                );
                return Err(Error::new(Kind::Unsupported, message).key(name));
            }
            copy_op.src_start_bytes = start + src / per_unit * unit_bytes;
            copy_ops.push(copy_op);
        }
        let array = Array::new(
            requested.name.clone(),
            (stored_dtype, dtype),
            &requested.shape,
            copy_ops,
            padding,
        )?;
        planning.plan.arrays.push(array);
        Ok(())
    }

    /// The dtype and the bytes of each array of a request, without a plan. `cast` as in [`Self::plan`].
    ///
    /// # Errors
    /// There is no such key, it cannot be cast, an array is not an integer number of bytes, or all are too large.
    pub fn request_sizes(
        &self,
        requested: &Requested,
        cast: Option<Dtype>,
    ) -> Result<Vec<(Dtype, u64)>> {
        let mut sizes = Vec::with_capacity(requested.len());
        self.each_size(requested, cast, |dtype, n_bytes| {
            sizes.push((dtype, n_bytes));
        })?;
        Ok(sizes)
    }

    /// The bytes of all arrays of a request. `cast` and errors as [`Self::request_sizes`].
    pub fn request_bytes(&self, requested: &Requested, cast: Option<Dtype>) -> Result<u64> {
        let mut sum = 0;
        self.each_size(requested, cast, |_, n_bytes| sum += n_bytes)?;
        Ok(sum)
    }

    /// Calls a function with the dtype and the bytes of each array of a request.
    fn each_size(
        &self,
        requested: &Requested,
        cast: Option<Dtype>,
        mut each: impl FnMut(Dtype, u64),
    ) -> Result<()> {
        let (mut sum, mut near) = (0_u64, Near::default());
        let mut add = |key: &str, name: &str, n: u64| {
            let stored = self.dtype_near(key, &mut near)?;
            let dtype = cast_target(stored, self.cast_of(key, cast))
                .map_err(|error| error.key(key).within(named(key)))?;
            let n_bytes = dtype.n_bytes(&[n]);
            let total = n_bytes.and_then(|n| Some((n, sum.checked_add(n)?)));
            let (n_bytes, next) = total.ok_or_else(|| {
                let message = format!(
                    "{} is not an integer number of bytes, or too large",
                    named(name)
                );
                Error::new(Kind::Unsupported, message).key(key)
            })?;
            sum = next;
            each(dtype, n_bytes);
            Ok(())
        };
        match requested {
            Requested::Listed(request) => request.arrays.iter().try_for_each(|array| {
                add(&array.keys[0].0, &array.name, array.shape.iter().product())
            }),
            Requested::OfRank(request) => request.n_elements().try_for_each(|array| {
                let (key, n) = array?;
                add(key, key, n)
            }),
            Requested::Whole(request) => request
                .arrays()
                .try_for_each(|(name, key, shape)| add(key, name, shape.iter().product())),
        }
    }

    /// A request for tensors as they are, each with its name, and with its key where that is not the name.
    ///
    /// # Errors
    /// There is no such key.
    pub fn whole_request<'a>(
        &self,
        names: impl IntoIterator<Item = &'a str>,
        keys: Option<impl IntoIterator<Item = &'a str>>,
    ) -> Result<WholeRequest> {
        let (mut request, mut near) = (WholeRequest::default(), Near::default());
        let mut keys = keys.map(IntoIterator::into_iter);
        for name in names {
            let key = keys.as_mut().map(|keys| keys.next().unwrap_or(name));
            let found = self.found_near(key.unwrap_or(name), &mut near)?;
            request.add(name, key, found.shape());
        }
        Ok(request)
    }

    /// Sets an unknown dtype of a tensor from the file of a selected copy, which is opened in any case.
    fn set_dtype_from_file(&self, selected: &SelectedCopy<'_>) -> Result<()> {
        if let Some(&number) = self.by_key.get(&*selected.name) {
            let stored = &self.tensors[number as usize];
            if stored.dtype.get().is_none()
                && let Some((dtype, ..)) = self.open(selected.file)?.tensor(&selected.name)
            {
                stored.dtype.get_or_init(|| dtype);
            }
        }
        Ok(())
    }

    /// Number of copies in the plan of a request. Opens no file: only the symbolic part of planning is executed.
    pub fn count_copy_ops(&self, request: &Request) -> Result<usize> {
        let mut chosen_bytes = vec![0; self.files.len()];
        request.arrays.iter().try_fold(0, |n, requested| {
            let found = self.check_requested(requested)?;
            Ok(n + self
                .select(requested, found.as_ref(), &mut chosen_bytes)?
                .len())
        })
    }

    /// Checks keys, shapes and tiles. Returns the tensor if all tiles are of one.
    fn check_requested(&self, requested: &RequestedArray) -> Result<Option<Found<'_>>> {
        let mut last = None;
        for (key, shape) in &*requested.keys {
            let found = self.found(key)?;
            if let Some(shape) = shape {
                check_shape(key, &found, shape)?;
            }
            last = Some(found);
        }
        let only = last.filter(|_| match &*requested.keys {
            [(only, _)] => requested.tiles.iter().all(|(key, _)| key == only),
            _ => false,
        });
        for (key, tile) in &requested.tiles {
            let looked_up;
            let found = if let Some(found) = &only {
                found
            } else {
                looked_up = self.found(key)?;
                &looked_up
            };
            if !tile.global.lies_in(found.shape()) {
                let message = format!(
                    "{} has shape {}; {} is outside",
                    named(key),
                    Dims(found.shape()),
                    tile.global
                );
                return Err(Error::new(Kind::Argument, message).key(key));
            }
        }
        Ok(only)
    }

    /// Selects the copies of an array: each element once, with replicas chosen so that the bytes are spread over the
    /// files. `only` is the tensor of all its tiles, if there is one.
    fn select<'a>(
        &'a self,
        requested: &RequestedArray,
        only: Option<&Found<'a>>,
        chosen_bytes: &mut [u64],
    ) -> Result<Vec<SelectedCopy<'a>>> {
        let mut selected = Vec::new();
        for (key, tile) in &requested.tiles {
            if tile.global.is_empty() {
                continue;
            }
            let looked_up;
            let found = if let Some(found) = only {
                found
            } else {
                looked_up = self.found(key)?;
                &looked_up
            };
            if let Some(file) = found.only_file()
                && matches!(self.file_format(file)?, Format::Safetensors)
            {
                let stored = (found.name(), found.shape());
                select_whole(stored, file, tile, chosen_bytes, &mut selected);
                continue;
            }
            match found {
                Found::InWholeFile(file, entry) => {
                    let grid = Grid::whole(&entry.shape, *file);
                    grid.select(entry.name, tile, chosen_bytes, &mut selected)?;
                }
                Found::Listed(stored) => match &stored.form {
                    Form::Grid(grid) => {
                        grid.select(&stored.key, tile, chosen_bytes, &mut selected)?;
                    }
                    Form::Tiles(tiles) => {
                        tiles.select(stored, tile, chosen_bytes, &mut selected)?;
                    }
                    Form::Flat(flat) => {
                        select_flat(flat, &stored.shape, tile, chosen_bytes, &mut selected);
                    }
                    Form::Divided(divided) => {
                        let key = &stored.key;
                        select_divided(divided, key, tile, chosen_bytes, &mut selected)?;
                    }
                },
            }
        }
        Ok(selected)
    }
}

/// Compares a tensor with the shape that a layout is for.
pub(super) fn check_shape(key: &str, found: &Found<'_>, shape: &[u64]) -> Result<()> {
    if found.shape() == shape {
        return Ok(());
    }
    let message = format!(
        "{} has shape {}, but the layout is for {}",
        named(key),
        Dims(found.shape()),
        Dims(shape)
    );
    Err(Error::new(Kind::Mismatch, message).key(key))
}

pub(super) fn cast_target(stored: Dtype, cast: Option<Dtype>) -> Result<Dtype> {
    let Some(cast) = cast else { return Ok(stored) };
    if !stored.is_float() {
        return Ok(stored);
    }
    if !can_cast(stored, cast) {
        return Err(Error::new(
            Kind::Unsupported,
            format!("a cast from {stored} to {cast} is not supported"),
        )
        .hint(
            "casts between F64, F32, F16 and BF16 are supported; select other tensors with `keys=`",
        ));
    }
    Ok(cast)
}
