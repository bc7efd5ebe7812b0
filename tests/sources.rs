//! A second kind of source, an object in memory that is read by ranges, and a second kind of sink: header, plan, copy,
//! verification and writing give the same results as for local files.

use reshard_core::checksum::Checksums;
use reshard_core::control::Control;
use reshard_core::copy::fill;
use reshard_core::dtype::Dtype;
use reshard_core::error::{Error, Kind, Result};
use reshard_core::header::Header;
use reshard_core::index::Index;
use reshard_core::memory::Stores;
use reshard_core::plan::{MemoryTensor, Plan};
use reshard_core::region::Region;
use reshard_core::request::Request;
use reshard_core::route::Route;
use reshard_core::shard_file::Format;
use reshard_core::source::{Method, Ranges, Source};
use reshard_core::team::Team;
use reshard_core::verify::{scrub, verify};
use reshard_core::writer::{self, Buffers, Options, Sink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// An object in memory. It counts the bytes that were read, and fails from byte `unreadable_from` on.
#[derive(Debug, Clone)]
struct Object {
    bytes: Arc<Vec<u8>>,
    is_borrowable: bool,
    unreadable_from: u64,
    n_read: Arc<AtomicU64>,
}

impl Object {
    fn new(bytes: Vec<u8>, is_borrowable: bool) -> Self {
        Self {
            bytes: Arc::new(bytes),
            is_borrowable,
            unreadable_from: u64::MAX,
            n_read: Arc::default(),
        }
    }

    fn source(&self) -> Source {
        let n_bytes = self.bytes.len() as u64;
        Source::of_ranges(name(), n_bytes, Box::new(self.clone()))
    }

    fn range(&self, start: u64, len: u64) -> Result<&[u8]> {
        if start + len > self.unreadable_from {
            return Err(Error::new(Kind::Io, "the store does not answer").path(&name()));
        }
        self.n_read.fetch_add(len, Relaxed);
        Ok(&self.bytes[start as usize..(start + len) as usize])
    }
}

impl Ranges for Object {
    fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
        to.copy_from_slice(self.range(start, to.len() as u64)?);
        Ok(())
    }

    fn bytes(&self, start: u64, len: u64) -> Result<Option<&[u8]>> {
        self.is_borrowable
            .then(|| self.range(start, len))
            .transpose()
    }

    fn is_borrowable(&self) -> bool {
        self.is_borrowable
    }
}

fn name() -> PathBuf {
    PathBuf::from("store://bucket/model.safetensors")
}

const SHAPE: [u64; 2] = [300, 2000];

/// A shard file with a matrix and a vector, and its checksums.
fn shard_file() -> (Vec<u8>, Checksums) {
    with_plan(written)
}

/// The bytes of the file of a plan, and its checksums.
fn written(plan: &Plan<'_>) -> (Vec<u8>, Checksums) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let options = Options {
        metadata: metadata(),
        container: None,
        durable: false,
        direct: false,
        mode: 0o600,
    };
    let mut buffers = Buffers::new(16 << 20).unwrap();
    let checksums =
        writer::write(&path, plan, &options, &mut buffers, &Control::default()).unwrap();
    (std::fs::read(path).unwrap(), checksums.checksums)
}

fn metadata() -> Vec<(String, String)> {
    vec![("format".into(), "pt".into())]
}

/// Calls `action` with a plan of the tensors of the shard file.
fn with_plan<T>(action: impl FnOnce(&Plan<'_>) -> T) -> T {
    let data: Vec<u8> = (0..SHAPE[0] * SHAPE[1] * 4)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let tensor = |(name, shape, strides): (&'static str, &'static [u64], &[u64])| MemoryTensor {
        name,
        dtype: Dtype::F32,
        shape,
        bytes: &data,
        strides_bytes: strides.to_vec(),
    };
    let matrix = tensor(("matrix", &SHAPE, &[SHAPE[1] * 4, 4]));
    let tensors = vec![matrix, tensor(("vector", &[70], &[4]))];
    action(&Plan::of_memory(tensors).unwrap())
}

/// Boxes of the matrix that are dense, with long runs, with short runs and single columns, and the vector.
fn request() -> Request {
    let mut request = Request::default();
    for (i, (offset, shape)) in [
        ([0, 0], SHAPE),
        ([100, 500], [150, 1300]),
        ([7, 3], [250, 40]),
        ([0, 1999], [300, 1]),
    ]
    .into_iter()
    .enumerate()
    {
        let region = Region::new(offset.to_vec(), shape.to_vec()).unwrap();
        request.add_region(&format!("box {i}"), "matrix", region);
    }
    let region = Region::new(vec![1], vec![69]).unwrap();
    request.add_region("vector", "vector", region);
    request
}

fn index_over(
    open: impl Fn() -> Result<Source> + Send + Sync + 'static,
    checksums: Option<Checksums>,
) -> Index {
    let mut index = Index::new();
    let file = index.add_source(name(), Format::Safetensors, open);
    if let Some(checksums) = checksums {
        index.set_checksums(file, checksums).unwrap();
    }
    for key in ["matrix", "vector"] {
        index.add_whole(key, file).unwrap();
    }
    index
}

fn filled(plan: &Plan<'_>) -> Result<Vec<Vec<u8>>> {
    let mut out: Vec<Vec<u8>> = plan
        .arrays()
        .iter()
        .map(|array| vec![0xAA; array.n_bytes() as usize])
        .collect();
    let to = out.iter_mut().map(Vec::as_mut_slice).collect();
    fill(
        plan,
        to,
        Stores::Fresh,
        &Control::default(),
        &Team::current(),
    )?;
    Ok(out)
}

#[test]
fn a_plan_over_ranges_copies_what_a_plan_over_a_local_file_copies() {
    let (bytes, checksums) = shard_file();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    let local = index_over(move || Source::open(&path, false, Method::Map), None);
    let expected = filled(&local.plan(&request(), None, false).unwrap()).unwrap();
    for is_borrowable in [false, true] {
        for checksums in [None, Some(checksums.clone())] {
            let object = Object::new(bytes.clone(), is_borrowable);
            let opened = object.clone();
            let index = index_over(move || Ok(opened.source()), checksums);
            index.check_coverage().unwrap();
            assert_eq!(index.check().unwrap(), []);
            let plan = index.plan(&request(), None, true).unwrap();
            assert!(
                filled(&plan).unwrap() == expected,
                "lending: {is_borrowable}"
            );
        }
    }
}

#[test]
fn every_kind_of_memory_gets_the_same_bytes_and_damage_is_found() {
    let (bytes, checksums) = shard_file();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    let object = Object::new(bytes.clone(), false);
    let expected = index_over(move || Ok(object.source()), None);
    let expected = filled(&expected.plan(&request(), None, false).unwrap()).unwrap();
    let copied = |stores, checksums: Option<Checksums>, path: &Path| {
        let path = path.to_owned();
        let index = index_over(move || Source::open(&path, false, Method::Auto), checksums);
        let plan = index.plan(&request(), None, true).unwrap();
        // Destinations begin at any byte.
        let mut out: Vec<Vec<u8>> = plan
            .arrays()
            .iter()
            .map(|array| vec![0xAA; array.n_bytes() as usize + 1])
            .collect();
        let to = out.iter_mut().map(|to| &mut to[1..]).collect();
        fill(&plan, to, stores, &Control::default(), &Team::current())?;
        Ok::<_, Error>(
            out.into_iter()
                .map(|to| to[1..].to_vec())
                .collect::<Vec<_>>(),
        )
    };
    let mut damaged = bytes;
    let last = damaged.len() - 1;
    damaged[last - 300_000] ^= 4;
    let damaged_path = folder.path().join("damaged.safetensors");
    std::fs::write(&damaged_path, &damaged).unwrap();
    for stores in [Stores::Fresh, Stores::Plain, Stores::Streaming] {
        for checksums in [None, Some(checksums.clone())] {
            let found = copied(stores, checksums, &path).unwrap();
            assert!(found == expected, "{stores:?}");
        }
        let error = copied(stores, Some(checksums.clone()), &damaged_path).unwrap_err();
        assert_eq!(error.kind(), Kind::Damaged, "{stores:?}: {error}");
    }
    // Memory of the caller.
    with_plan(|plan| {
        let copied = |stores| {
            let mut out: Vec<Vec<u8>> = plan
                .arrays()
                .iter()
                .map(|array| vec![0xAA; array.n_bytes() as usize])
                .collect();
            let to = out.iter_mut().map(Vec::as_mut_slice).collect();
            fill(plan, to, stores, &Control::default(), &Team::current()).unwrap();
            out
        };
        assert!(copied(Stores::Fresh) == copied(Stores::Streaming));
        assert!(copied(Stores::Fresh)[0] == expected[0]);
    });
}

#[test]
fn a_verified_load_reads_every_chunk_once() {
    const N: usize = (8 << 20) + (100 << 10);
    let data: Vec<u8> = (0..N).map(|i| (i * i % 251) as u8).collect();
    let tensor = MemoryTensor {
        name: "vector",
        dtype: Dtype::U8,
        shape: &[N as u64],
        bytes: &data,
        strides_bytes: vec![1],
    };
    let (bytes, checksums) = written(&Plan::of_memory(vec![tensor]).unwrap());
    let mut request = Request::default();
    let all = Region::new(vec![0], vec![N as u64]).unwrap();
    request.add_region("vector", "vector", all);
    let mut index = Index::new();
    let object = Object::new(bytes, false);
    let opened = object.clone();
    let file = index.add_source(name(), Format::Safetensors, move || Ok(opened.source()));
    index.set_checksums(file, checksums.clone()).unwrap();
    index.add_whole("vector", file).unwrap();
    let plan = index.plan(&request, None, true).unwrap();
    let mut out = vec![0; N];
    let before = object.n_read.load(Relaxed);
    fill(
        &plan,
        vec![&mut out],
        Stores::Fresh,
        &Control::default(),
        &Team::current(),
    )
    .unwrap();
    assert!(out == data);
    let n_read = object.n_read.load(Relaxed) - before;
    assert_eq!(n_read, checksums.n_bytes());
}

#[test]
fn into_new_memory_no_more_is_read_than_into_given_memory() {
    const ROWS: u64 = 4000;
    const COLUMNS: u64 = 4096;
    let data: Vec<u8> = (0..ROWS * COLUMNS).map(|i| (i * i % 251) as u8).collect();
    let tensor = MemoryTensor {
        name: "matrix",
        dtype: Dtype::U8,
        shape: &[ROWS, COLUMNS],
        bytes: &data,
        strides_bytes: vec![COLUMNS, 1],
    };
    let (bytes, checksums) = written(&Plan::of_memory(vec![tensor]).unwrap());
    let mut request = Request::default();
    let columns = Region::new(vec![0, 0], vec![ROWS, COLUMNS - 96]).unwrap();
    request.add_region("matrix", "matrix", columns);
    let mut index = Index::new();
    let object = Object::new(bytes, false);
    let opened = object.clone();
    let file = index.add_source(name(), Format::Safetensors, move || Ok(opened.source()));
    index.set_checksums(file, checksums).unwrap();
    index.add_whole("matrix", file).unwrap();
    let plan = index.plan(&request, None, true).unwrap();
    let mut out = vec![0; (ROWS * (COLUMNS - 96)) as usize]; // bands end at pages: the same memory for both
    let n_read = [Stores::Fresh, Stores::Streaming].map(|stores| {
        out.fill(0);
        let before = object.n_read.load(Relaxed);
        let control = Control::default();
        fill(&plan, vec![&mut out], stores, &control, &Team::current()).unwrap();
        let rows = data.chunks(COLUMNS as usize);
        assert!(rows.flat_map(|row| &row[..COLUMNS as usize - 96]).eq(&out));
        object.n_read.load(Relaxed) - before
    });
    assert_eq!(n_read[0], n_read[1]);
}

#[test]
fn opening_a_file_reads_only_its_header() {
    let (bytes, checksums) = shard_file();
    let object = Object::new(bytes, false);
    let header = Header::read(&object.source()).unwrap();
    assert_eq!(header.len(), 2);
    assert_eq!(object.n_read.load(Relaxed), header.data_start());
    assert_eq!(header.checksum(), checksums.header_checksum());
}

#[test]
fn damage_in_a_range_is_found_by_copies_by_verification_and_by_a_scrub() {
    let (bytes, checksums) = shard_file();
    let at = bytes.len() - 300_000;
    let mut damaged = bytes.clone();
    damaged[at] ^= 4;
    let (control, n_bytes) = (Control::default(), bytes.len() as u64);
    for is_borrowable in [false, true] {
        let whole = Object::new(bytes.clone(), is_borrowable).source();
        let object = Object::new(damaged.clone(), is_borrowable);
        for direct in [false, true] {
            assert_eq!(
                scrub(&whole, &checksums, 0..n_bytes, None, direct, &control).unwrap(),
                []
            );
            let ranges = scrub(
                &object.source(),
                &checksums,
                0..n_bytes,
                None,
                direct,
                &control,
            )
            .unwrap();
            assert!(
                matches!(ranges[..], [(start, end)] if (start..end).contains(&(at as u64))),
                "{ranges:?}"
            );
        }
        let index = index_over(move || Ok(object.source()), Some(checksums.clone()));
        let plan = index.plan(&request(), None, true).unwrap();
        for error in [
            filled(&plan).unwrap_err(),
            verify(&plan, &[0], &control).unwrap_err(),
        ] {
            assert_eq!(error.kind(), Kind::Damaged, "{error}");
            assert!(error.message().contains("store://bucket/"), "{error}");
        }
    }
}

#[test]
fn the_error_of_a_store_is_the_error_of_the_copy() {
    let (bytes, _) = shard_file();
    for is_borrowable in [false, true] {
        let mut object = Object::new(bytes.clone(), is_borrowable);
        object.unreadable_from = 2_000_000;
        let index = index_over(move || Ok(object.source()), None);
        let error = filled(&index.plan(&request(), None, true).unwrap()).unwrap_err();
        assert_eq!(error.kind(), Kind::Io, "{error}");
        assert_eq!(error.message(), "the store does not answer");
    }
}

#[test]
fn ranges_outside_the_object_are_rejected_without_a_read() {
    let object = Object::new(vec![7; 100], true);
    let source = object.source();
    assert_eq!(source.bytes(90, 11).unwrap_err().kind(), Kind::Damaged);
    let error = source.read_at(u64::MAX, &mut [0; 2]).unwrap_err();
    assert_eq!(error.kind(), Kind::Damaged);
    assert!(!source.is_resident(90, 11));
    assert_eq!(object.n_read.load(Relaxed), 0);
    assert!(
        source.private_map().unwrap().is_none(),
        "only a local file can be mapped"
    );
}

/// An upload to a store in memory: its name appears there when it is published.
struct Upload<'a> {
    store: &'a Mutex<Option<Vec<u8>>>,
    parts: Mutex<Vec<u8>>,
    fails_from: u64,
}

impl Sink for Upload<'_> {
    fn write_at(&self, start: u64, bytes: &[u8], _: Route) -> Result<()> {
        if start >= self.fails_from {
            return Err(Error::new(Kind::Io, "the store does not answer"));
        }
        let mut parts = self.parts.lock().unwrap();
        parts[start as usize..start as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn publish(self) -> Result<Vec<String>> {
        *self.store.lock().unwrap() = Some(self.parts.into_inner().unwrap());
        Ok(Vec::new())
    }
}

#[test]
fn a_sink_gets_the_bytes_of_the_local_file_and_nothing_is_published_after_an_error() {
    let (bytes, checksums) = shard_file();
    for fails_from in [u64::MAX, 0] {
        let store = Mutex::new(None);
        let create = |n_bytes| {
            Ok(Upload {
                store: &store,
                parts: Mutex::new(vec![0; n_bytes as usize]),
                fails_from,
            })
        };
        let mut buffers = Buffers::new(16 << 20).unwrap();
        let control = Control::default();
        let written =
            with_plan(|plan| writer::write_to(create, plan, &metadata(), &mut buffers, &control));
        let published = store.into_inner().unwrap();
        if fails_from == 0 {
            assert_eq!(written.unwrap_err().message(), "the store does not answer");
            assert!(published.is_none());
        } else {
            assert_eq!(written.unwrap().checksums, checksums);
            assert!(published.unwrap() == bytes);
        }
    }
}
