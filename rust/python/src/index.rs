//! The index.

use crate::errors::{of_python, raise};
use crate::geometry::{Layout, Request};
use crate::plan::{Plan, array_infos};
use crate::records::{
    CHANGED_FILE, DEVICE_LAYOUT, FILE_STATE, FileArray, FileTensor, STORED_ARRAY, STORED_REGION,
    tile_list,
};
use crate::run::{n_threads, run};
use crate::values::{DtypeName, dtype_of};
use crate::write::Written;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyDict, PyString, PyTuple};
use reshard_core::checksum::Checksums;
use reshard_core::control::Control;
use reshard_core::copies::{Copies, first_different};
use reshard_core::flat::Lines;
use reshard_core::index::{CHUNK_TENSORS, Change, Held, ReadChecksums, drop_large};
use reshard_core::region::{Region, row_major_strides};
use reshard_core::request::Requested;
use reshard_core::shard_file::{Format, ShardFile};
use reshard_core::source::{Method, Stamp};
use reshard_core::stored::StoredTensor;
use reshard_core::team::Team;
use reshard_core::tile::Tile;
use reshard_core::{Error, Kind, small_files, writer};
use reshard_formats::metadata::{self, Metadata, MetadataTensor};
use reshard_formats::{ckpt, gguf, torch_file};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

type TileArguments = (Vec<u64>, Vec<u64>, u64, Vec<u64>);
/// Rank, file, stored name and shape, first element, shape, dtype, strides unless row-major.
type HeldArray = (
    u64,
    u32,
    String,
    Vec<u64>,
    u64,
    Vec<u64>,
    DtypeName,
    Option<Vec<u64>>,
);

#[pyclass(module = "reshard._core")]
pub(crate) struct Index {
    index: reshard_core::index::Index,
    /// Layouts and dtypes from `metadata.json`. Its tensors are the first of the index.
    described: Option<Metadata>,
}

impl Drop for Index {
    fn drop(&mut self) {
        if let Some(metadata) = self.described.take() {
            drop_large(metadata.tensors.len(), metadata);
        }
    }
}

/// Flat arrays in which tensors lie one after the other.
#[pyclass(frozen, module = "reshard._core")]
pub(crate) struct FlatLines(Arc<Lines>);

#[pymethods]
impl FlatLines {
    #[staticmethod]
    fn joined(py: Python<'_>, arrays: Vec<(u32, String, u64)>) -> PyResult<Self> {
        raise(py, Lines::joined(arrays)).map(|lines| Self(Arc::new(lines)))
    }

    #[staticmethod]
    fn divided(py: Python<'_>, files: Vec<u32>, arrays: Vec<(String, u64)>) -> PyResult<Self> {
        raise(py, Lines::divided(files, arrays)).map(|lines| Self(Arc::new(lines)))
    }

    #[getter]
    fn n(&self) -> u64 {
        self.0.n()
    }
}

pub(crate) fn parse_method(method: &str) -> reshard_core::Result<Method> {
    match method {
        "auto" => Ok(Method::Auto),
        "map" => Ok(Method::Map),
        "read" => Ok(Method::Read),
        other => Err(Error::new(
            Kind::Argument,
            format!("`method` is `{other}`; `auto`, `map` or `read` are accepted"),
        )),
    }
}

fn checksums_of(
    n_bytes: u64,
    header_bytes: u64,
    header_checksum: u32,
    checksums: Option<&[u8]>,
) -> reshard_core::Result<Checksums> {
    match checksums {
        Some(bytes) => Checksums::from_bytes(n_bytes, header_bytes, header_checksum, bytes),
        None => Checksums::without_chunks(n_bytes, header_bytes, header_checksum),
    }
}

impl Index {
    /// An index of the core.
    pub(crate) fn of(index: reshard_core::index::Index) -> Self {
        Self {
            index,
            described: None,
        }
    }

    /// The index of the core.
    pub(crate) fn core(&self) -> &reshard_core::index::Index {
        &self.index
    }

    /// The index of the core, to change it.
    pub(crate) fn core_mut(&mut self) -> &mut reshard_core::index::Index {
        &mut self.index
    }

    /// An index with the layouts and dtypes of `metadata.json`.
    fn described(index: reshard_core::index::Index, mut metadata: Metadata) -> Self {
        for tensor in &mut metadata.tensors {
            // The index has its own copy of the table. Only layouts and dtypes are used later.
            tensor.cells = Arc::default();
        }
        Self {
            index,
            described: Some(metadata),
        }
    }

    /// A tensor in the description.
    fn in_metadata(&self, key: &str) -> Option<&MetadataTensor> {
        self.described
            .as_ref()?
            .tensors
            .get(self.index.number(key)?)
    }

    /// Opens a file with the interpreter released: parsing a `.ckpt` reads all over the file.
    fn opened(&self, py: Python<'_>, file: u32) -> reshard_core::Result<Arc<ShardFile>> {
        py.detach(|| self.index.open(file))
    }
}

#[pymethods]
impl Index {
    #[new]
    fn new() -> Self {
        Self::of(reshard_core::index::Index::new())
    }

    #[staticmethod]
    #[pyo3(signature = (path, *, data=None, method="auto"))]
    fn from_metadata(
        py: Python<'_>,
        path: PathBuf,
        data: Option<&[u8]>,
        method: &str,
    ) -> PyResult<Self> {
        let method = raise(py, parse_method(method))?;
        let opened = py.detach(|| metadata::open(&path, data, method));
        let (metadata, index) = raise(py, opened)?;
        Ok(Self::described(index, metadata))
    }

    #[staticmethod]
    #[pyo3(signature = (path, data, digest, *, method="auto", read_headers=false))]
    fn from_metadata_table(
        py: Python<'_>,
        path: PathBuf,
        data: &[u8],
        digest: &str,
        method: &str,
        read_headers: bool,
    ) -> PyResult<Self> {
        let method = raise(py, parse_method(method))?;
        let opened = py.detach(|| metadata::open_table(&path, data, digest, method, read_headers));
        let (metadata, index) = raise(py, opened)?;
        Ok(Self::described(index, metadata))
    }

    #[getter]
    fn n_files(&self) -> usize {
        self.index.n_files()
    }

    #[pyo3(signature = (path, *, follow_links=true, method="auto"))]
    fn add_file(
        &mut self,
        py: Python<'_>,
        path: PathBuf,
        follow_links: bool,
        method: &str,
    ) -> PyResult<u32> {
        let method = raise(py, parse_method(method))?;
        Ok(self.index.add_file(path, follow_links, method))
    }

    fn files_again(&self, py: Python<'_>, numbers: Vec<u32>) -> PyResult<Self> {
        Ok(Self::of(raise(py, self.index.files_again(&numbers))?))
    }

    fn add_files_of(&mut self, py: Python<'_>, other: &Self) -> PyResult<u32> {
        raise(py, self.index.add_files_of(&other.index))
    }

    #[pyo3(signature = (path, *, follow_links=true, method="auto", within=None, prefix=String::new()))]
    fn add_torch_file(
        &mut self,
        py: Python<'_>,
        path: PathBuf,
        follow_links: bool,
        method: &str,
        within: Option<(u64, u64)>,
        prefix: String,
    ) -> PyResult<u32> {
        let method = raise(py, parse_method(method))?;
        let format = torch_file::format(within, prefix);
        Ok(self.index.add_local(path, follow_links, method, format))
    }

    #[pyo3(signature = (path, *, follow_links=true, method="auto"))]
    fn add_ckpt_file(
        &mut self,
        py: Python<'_>,
        path: PathBuf,
        follow_links: bool,
        method: &str,
    ) -> PyResult<u32> {
        let method = raise(py, parse_method(method))?;
        Ok(self
            .index
            .add_local(path, follow_links, method, ckpt::format()))
    }

    #[pyo3(signature = (path, *, method="auto"))]
    fn add_gguf_file(&mut self, py: Python<'_>, path: PathBuf, method: &str) -> PyResult<u32> {
        let method = raise(py, parse_method(method))?;
        Ok(self.index.add_local(path, true, method, gguf::format()))
    }

    fn set_checksums(
        &mut self,
        py: Python<'_>,
        file: u32,
        n_bytes: u64,
        header_bytes: u64,
        header_checksum: u32,
        checksums: Option<&[u8]>,
    ) -> PyResult<()> {
        let checksums = checksums_of(n_bytes, header_bytes, header_checksum, checksums);
        raise(py, self.index.set_checksums(file, raise(py, checksums)?))
    }

    fn set_checksums_reader(&mut self, read: Py<PyAny>) {
        type Recorded = (u64, u64, u32, Option<PyBackedBytes>);
        let read = move |paths: &[&Path], with_chunks: bool| {
            let found = Python::attach(|py| {
                let paths: Vec<_> = paths.iter().map(|path| path.as_os_str()).collect();
                read.bind(py)
                    .call1((paths, with_chunks))?
                    .extract::<Vec<Recorded>>()
            });
            let found = found.map_err(of_python)?.into_iter();
            found
                .map(|(n_bytes, header_bytes, header_checksum, checksums)| {
                    checksums_of(n_bytes, header_bytes, header_checksum, checksums.as_deref())
                })
                .collect()
        };
        self.index
            .set_checksums_reader(ReadChecksums(Arc::new(read)));
    }

    #[getter]
    fn file_names<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyString>>> {
        (0..self.index.n_files() as u32)
            .map(|file| {
                let path = raise(py, self.index.file_path(file))?;
                path.file_name()
                    .unwrap_or_default()
                    .into_pyobject(py)
                    .map_err(Into::into)
            })
            .collect()
    }

    /// As text: `pathlib` would join the slashes of a URL.
    fn file_path(&self, py: Python<'_>, file: u32) -> PyResult<OsString> {
        raise(py, self.index.file_path(file)).map(OsString::from)
    }

    fn file_bytes(&self, py: Python<'_>, file: u32) -> PyResult<u64> {
        Ok(raise(py, self.opened(py, file))?.source().n_bytes())
    }

    #[pyo3(signature = (*, in_place=false))]
    fn changed_file<'py>(
        &self,
        py: Python<'py>,
        in_place: bool,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let changed = py.detach(|| self.index.changed_file(in_place));
        let state =
            |stamp: Stamp| FILE_STATE.of(py, (stamp.n_bytes, stamp.modified_ns, stamp.inode));
        let record = |change: Change<'_>| {
            let path = change.path.as_os_str().to_owned();
            let now = change.now.map(state).transpose()?;
            CHANGED_FILE.of(py, (path, state(change.opened)?, now))
        };
        raise(py, changed)?.map(record).transpose()
    }

    fn file_metadata(
        &self,
        py: Python<'_>,
        file: u32,
    ) -> PyResult<Option<BTreeMap<String, String>>> {
        let opened = raise(py, self.opened(py, file))?;
        Ok(opened
            .table()
            .metadata()
            .map(|pairs| pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect()))
    }

    fn file_tensors(&self, py: Python<'_>, file: u32) -> PyResult<Vec<FileTensor>> {
        let opened = raise(py, self.opened(py, file))?;
        let table = opened.table();
        let tensors = (0..table.len()).map(|i| {
            let entry = table.entry(i);
            FileTensor {
                name: entry.name.to_owned(),
                dtype: entry.dtype.name(),
                shape: entry.shape,
                start: entry.start,
                end: entry.end,
            }
        });
        Ok(tensors.collect())
    }

    fn file_arrays(&self, py: Python<'_>, file: u32) -> PyResult<Vec<FileArray>> {
        let opened = raise(py, self.opened(py, file))?;
        let arrays = opened.table().arrays().into_iter();
        Ok(arrays.map(FileArray).collect())
    }

    fn file_strings(&self, py: Python<'_>, file: u32) -> PyResult<Vec<String>> {
        let opened = raise(py, self.opened(py, file))?;
        Ok(opened.table().strings().to_vec())
    }

    fn verify_crc(&self, py: Python<'_>, file: u32) -> PyResult<bool> {
        if matches!(
            raise(py, self.index.file_format(file))?,
            Format::Safetensors
        ) {
            return Ok(false);
        }
        let opened = raise(py, self.opened(py, file))?;
        let control = Control::default();
        let n_bytes = opened.source().n_bytes();
        run(py, None, n_bytes, None, &control, || {
            opened.verify(&control)
        })?;
        Ok(opened.has_crc())
    }

    fn add_whole(&mut self, py: Python<'_>, key: &str, file: u32) -> PyResult<()> {
        let added = py.detach(|| self.index.add_whole(key, file));
        raise(py, added)
    }

    fn add_whole_file(&mut self, py: Python<'_>, file: u32) -> PyResult<()> {
        let added = py.detach(|| self.index.add_whole_file(file));
        raise(py, added)
    }

    fn add_layout(
        &mut self,
        py: Python<'_>,
        key: &str,
        dtype: DtypeName,
        layout: &Layout,
        files: Vec<u32>,
    ) -> PyResult<()> {
        let files = self.index.shared_files(files);
        raise(py, self.index.add_layout(key, dtype.0, &layout.0, &files))
    }

    #[pyo3(signature = (key, dtype, shape, stored, *, overlapping=false, factors=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields that describe a tensor"
    )]
    fn add_tiles(
        &mut self,
        py: Python<'_>,
        key: &str,
        dtype: DtypeName,
        shape: Vec<u64>,
        stored: Vec<(u32, String, Vec<u64>, Vec<TileArguments>)>,
        overlapping: bool,
        factors: Option<BTreeMap<usize, Vec<u64>>>,
    ) -> PyResult<()> {
        let add = || {
            let tile = |(offset, shape, local_offset, local_strides): TileArguments| {
                Ok(Tile {
                    global: Region::new(offset, shape)?,
                    local_offset,
                    local_strides,
                })
            };
            let stored = stored
                .into_iter()
                .map(|(file, name, shape, tiles)| {
                    let tiles = tiles
                        .into_iter()
                        .map(tile)
                        .collect::<reshard_core::Result<Vec<_>>>()?;
                    Ok((StoredTensor { file, name, shape }, tiles))
                })
                .collect::<reshard_core::Result<Vec<_>>>()?;
            let factors = factors.unwrap_or_default();
            self.index
                .add_tiles(key, dtype.0, shape, factors, stored, overlapping)
        };
        raise(py, add().map_err(|error| error.key(key)))
    }

    fn add_same(&mut self, py: Python<'_>, key: &str, other: &Self, name: &str) -> PyResult<()> {
        let added = py.detach(|| self.index.add_same(key, &other.index, name));
        raise(py, added)
    }

    fn keep_dtypes(&mut self, keys: Vec<String>) {
        self.index
            .keep_dtypes(keys.into_iter().map(String::into_boxed_str));
    }

    fn add_flat(
        &mut self,
        py: Python<'_>,
        key: &str,
        dtype: DtypeName,
        shape: Vec<u64>,
        lines: &FlatLines,
        start: u64,
    ) -> PyResult<()> {
        let added = self.index.add_flat(key, dtype.0, shape, &lines.0, start);
        raise(py, added)
    }

    fn __len__(&self) -> usize {
        self.index.len()
    }

    fn __contains__(&self, key: &Bound<'_, PyAny>) -> bool {
        key.extract::<&str>()
            .is_ok_and(|key| self.index.contains(key))
    }

    fn keys(&self) -> Vec<&str> {
        self.index.keys().collect()
    }

    fn alike(&self, py: Python<'_>) -> PyResult<(Vec<u32>, Vec<u32>)> {
        raise(py, py.detach(|| self.index.alike()))
    }

    fn places(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        raise(py, py.detach(|| self.index.places()))
    }

    fn not_taken(&self, py: Python<'_>, file: u32) -> PyResult<Vec<String>> {
        raise(py, py.detach(|| self.index.not_taken(file)))
    }

    fn add_wholes(&mut self, py: Python<'_>, tensors: Vec<(PyBackedStr, u32)>) -> PyResult<()> {
        let mut tensors = tensors.iter();
        let added =
            py.detach(|| tensors.try_for_each(|(key, file)| self.index.add_whole(key, *file)));
        raise(py, added)
    }

    fn key(&self, number: usize) -> PyResult<&str> {
        let key = self.index.key(number);
        key.ok_or_else(|| PyIndexError::new_err("there is no key with this number"))
    }

    fn info<'py>(
        &self,
        py: Python<'py>,
        key: &str,
    ) -> PyResult<(&'static str, Bound<'py, PyTuple>)> {
        let (dtype, shape) = raise(py, self.index.info(key))?;
        Ok((dtype.name(), PyTuple::new(py, shape)?))
    }

    fn shape<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, raise(py, self.index.shape(key))?)
    }

    fn holders(&self, py: Python<'_>, key: &str) -> PyResult<Vec<u32>> {
        raise(py, self.index.holders(key))
    }

    fn shards<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let shards = raise(py, self.index.shards(key))?.into_iter();
        shards
            .map(|(region, files)| {
                let offset = PyTuple::new(py, region.offset())?;
                let shape = PyTuple::new(py, region.shape())?;
                STORED_REGION.of(py, (offset, shape, files))
            })
            .collect()
    }

    fn stored<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let stored = raise(py, self.index.stored_arrays(key))?.into_iter();
        stored
            .map(|(tensor, tiles)| {
                let shape = PyTuple::new(py, tensor.shape)?;
                let values = (tensor.file, tensor.name, shape, tile_list(py, &tiles)?);
                STORED_ARRAY.of(py, values)
            })
            .collect()
    }

    fn metadata_layouts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        let Some(Metadata {
            layouts, tensors, ..
        }) = &self.described
        else {
            return Ok(found);
        };
        let records = layouts.iter().map(|layout| {
            let values = (
                layout.device_matrix.clone(),
                layout.tensor_map.clone(),
                layout.alias_name.clone(),
                layout.rank_list.clone(),
            );
            DEVICE_LAYOUT.of(py, values)
        });
        let records = records.collect::<PyResult<Vec<_>>>()?;
        for tensor in tensors {
            if let Some(number) = tensor.layout {
                found.set_item(&*tensor.name, &records[number as usize])?;
            }
        }
        Ok(found)
    }

    fn metadata_dtype(&self, key: &str) -> Option<&str> {
        Some(&self.in_metadata(key)?.dtype)
    }

    fn check_coverage(&self, py: Python<'_>) -> PyResult<()> {
        // Not on rayon's global pool: a forked child would wait for threads that only its parent has.
        run(py, None, 0, None, &Control::default(), || {
            self.index.check_coverage()
        })
    }

    #[pyo3(signature = (*, threads=None))]
    fn check(&self, py: Python<'_>, threads: Option<i64>) -> PyResult<Vec<(u32, String)>> {
        let control = Control::default();
        run(py, threads, 0, None, &control, || self.index.check())
    }

    fn check_headers(&self, py: Python<'_>) -> PyResult<Vec<(u32, String)>> {
        let control = Control::default();
        run(py, None, 0, None, &control, || {
            let dtype = |key: &str| metadata::dtype_of(self.metadata_dtype(key)?);
            self.index.check_headers(dtype)
        })
    }

    fn headers_with(&self, py: Python<'_>, text: &[u8]) -> PyResult<Vec<u32>> {
        let control = Control::default();
        run(py, None, 0, None, &control, || {
            Ok(self.index.headers_with(text))
        })
    }

    #[pyo3(signature = (request, *, dtype=None, verify=true))]
    fn plan(
        &self,
        py: Python<'_>,
        request: &Request,
        dtype: Option<DtypeName>,
        verify: bool,
    ) -> PyResult<Plan> {
        let dtype = dtype_of(dtype);
        let plan = || self.index.plan_requested(&request.0, dtype, verify);
        if request.0.len() > CHUNK_TENSORS {
            return run(py, None, 0, None, &Control::default(), plan).map(Plan);
        }
        raise(py, py.detach(plan)).map(Plan)
    }

    /// Writes small files, several at a time; `None` for those that are not small.
    #[pyo3(signature = (folder, files, *, dtype=None, metadata=None, threads=None, durable=true, mode=0o640))]
    #[expect(clippy::too_many_arguments, reason = "the options of a file")]
    fn write_small(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        files: Vec<(PyBackedStr, PyRef<'_, Request>)>,
        dtype: Option<DtypeName>,
        metadata: Option<BTreeMap<String, String>>,
        threads: Option<i64>,
        durable: bool,
        mode: u32,
    ) -> PyResult<Vec<Option<Written>>> {
        let dtype = dtype_of(dtype);
        let options = writer::Options {
            metadata: metadata.unwrap_or_default().into_iter().collect(),
            container: None,
            durable,
            direct: false,
            mode,
        };
        let files: Vec<_> = files
            .iter()
            .map(|(name, request)| (&**name, &request.0))
            .collect();
        let control = Control::default();
        let n_threads = n_threads(py, threads)?;
        // Writes wait for the disk, so signals are handled.
        let written = run(py, threads, u64::MAX, None, &control, || {
            small_files::write_small(
                &self.index,
                &folder,
                &files,
                dtype,
                &options,
                n_threads,
                &control,
            )
        })?;
        Ok(written.into_iter().map(|one| one.map(Written)).collect())
    }

    #[pyo3(signature = (requests, *, dtype=None))]
    fn request_bytes(
        &self,
        py: Python<'_>,
        requests: Vec<PyRef<'_, Request>>,
        dtype: Option<DtypeName>,
    ) -> PyResult<Vec<u64>> {
        let dtype = dtype_of(dtype);
        let n_bytes = |request: PyRef<'_, Request>| self.index.request_bytes(&request.0, dtype);
        raise(py, requests.into_iter().map(n_bytes).collect())
    }

    #[pyo3(signature = (request, *, dtype=None))]
    fn request_sizes(
        &self,
        py: Python<'_>,
        request: &Request,
        dtype: Option<DtypeName>,
    ) -> PyResult<Vec<u64>> {
        let dtype = dtype_of(dtype);
        let sizes = py.detach(|| self.index.request_sizes(&request.0, dtype));
        Ok(raise(py, sizes)?
            .into_iter()
            .map(|(_, n_bytes)| n_bytes)
            .collect())
    }

    #[pyo3(signature = (request, *, dtype=None))]
    fn request_arrays<'py>(
        &self,
        py: Python<'py>,
        request: &Request,
        dtype: Option<DtypeName>,
    ) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let dtype = dtype_of(dtype);
        let sizes = raise(
            py,
            py.detach(|| self.index.request_sizes(&request.0, dtype)),
        )?;
        if let Requested::Whole(request) = &request.0 {
            let arrays = request.arrays().zip(sizes);
            let arrays = arrays.map(|((name, _, shape), (dtype, n))| (name, dtype, shape, n));
            return array_infos(py, arrays);
        }
        let request = raise(py, request.0.request())?;
        let arrays = request.arrays().iter().zip(sizes);
        let arrays = arrays.map(|(a, (dtype, n))| (a.name(), dtype, a.shape(), n));
        array_infos(py, arrays)
    }

    #[pyo3(signature = (names, keys=None))]
    fn whole_request(
        &self,
        py: Python<'_>,
        names: Vec<PyBackedStr>,
        keys: Option<Vec<PyBackedStr>>,
    ) -> PyResult<Request> {
        if let Some(keys) = &keys
            && names.len() != keys.len()
        {
            let message = format!("{} names were given for {} keys", names.len(), keys.len());
            return raise(py, Err(Error::new(Kind::Argument, message)));
        }
        let names = names.iter().map(|name| &**name);
        let keys = keys.as_ref().map(|keys| keys.iter().map(|key| &**key));
        raise(py, self.index.whole_request(names, keys))
            .map(|request| Request(Requested::Whole(request)))
    }

    fn first_different(
        &self,
        py: Python<'_>,
        groups: Vec<Vec<HeldArray>>,
    ) -> PyResult<Option<(usize, usize)>> {
        let groups = groups
            .into_iter()
            .enumerate()
            .filter_map(|(number, group)| {
                let dtype = group.first()?.6.0;
                let part =
                    |(_, file, name, stored_shape, start, shape, _, strides): HeldArray| Held {
                        file,
                        name,
                        stored_shape,
                        start,
                        strides: strides.unwrap_or_else(|| row_major_strides(&shape)),
                        shape,
                    };
                let parts = group.into_iter().map(part).collect();
                Some(Ok((number, Copies { dtype, parts })))
            });
        let control = Control::default();
        run(py, None, 0, None, &control, || {
            first_different(&self.index, groups, &control, &Team::current())
        })
    }

    fn close(&self) {
        self.index.close();
    }
}
