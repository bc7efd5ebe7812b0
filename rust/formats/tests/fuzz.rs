//! The readers of pickles and zip archives on mutated files: real ones and hostile ones, changed at random from a seed.
//!
//! A reader may refuse a file or read it. It must not panic, read outside the file, or take more memory than a multiple of
//! the file. `RESHARD_FUZZ_RUNS=1000000 cargo test --release -p reshard-formats --test fuzz` runs more of them.

use reshard_core::source::{Method, Ranges, Source};
use reshard_core::{Error, Result};
use reshard_formats::dcp::{Dcp, index_of, paths};
use reshard_formats::pickle::Pickle;
use reshard_formats::torch_file::mesh::Meshes;
use reshard_formats::torch_file::{Leaf, Sharded, TorchFile};
use reshard_formats::zip::Window;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const RUNS: u64 = 20_000;

/// Bytes that may be held while a file is read: twice the file and this.
const MORE_BYTES: usize = 64 << 20;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

/// Counts the bytes that this thread holds.
struct Counting;

#[expect(unsafe_code, reason = "an allocator that counts can only be made so")]
// SAFETY: every call is passed on to the allocator of the system with the same arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = HELD.try_with(|held| {
            held.set(held.get().wrapping_add(layout.size()));
            let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
        });
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let _ = HELD.try_with(|held| held.set(held.get().wrapping_sub(layout.size())));
        // SAFETY: the pointer comes from `alloc`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that a function held beyond those that were held before.
fn most_held(function: impl FnOnce()) -> usize {
    let before = HELD.get();
    MOST.set(before);
    function();
    MOST.get().saturating_sub(before)
}

/// Numbers from a seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Bytes that mean something to a pickle or to a zip archive.
const WORDS: &[&[u8]] = &[
    b"PK\x03\x04",
    b"PK\x01\x02",
    b"PK\x05\x06",
    b"PK\x06\x06",
    b"PK\x06\x07",
    b"\xff\xff\xff\xff",
    b"\xff\xff",
    b"\0\0\0\0\0\0\0\x80",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x80\x02",
    b"\x80\x04\x95",
    b"(",
    b"t",
    b"R",
    b"b",
    b"e",
    b"u",
    b"}",
    b"]",
    b"h\0",
    b"j\0\0\0\0",
    b"q\x01",
    b"r\xff\xff\xff\xff",
    b"\x94",
    b"\x93",
    b"Q",
    b"\x81",
    b"cos\nsystem\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"\x8a\xff",
    b"X\xff\xff\xff\x7f",
    b"\x8e",
    b".",
    b"0",
    b"2",
];

fn mutated(bytes: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(6) {
        if bytes.is_empty() {
            break;
        }
        // Half of the changes at the end, where the directory of an archive is.
        let n = bytes.len();
        let at = if random.below(2) == 0 {
            n - 1 - random.below(n.min(400))
        } else {
            random.below(n)
        };
        match random.below(8) {
            0 => bytes[at] = random.next() as u8,
            1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes.truncate(at),
            3 => {
                let end = (at + random.below(64)).min(n);
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            4 => {
                let end = (at + random.below(64)).min(n);
                bytes.drain(at..end);
            }
            5 => {
                let word = WORDS[random.below(WORDS.len())];
                let end = (at + word.len()).min(n);
                bytes.splice(at..end, word.iter().copied());
            }
            6 => {
                let word = WORDS[random.below(WORDS.len())];
                bytes.splice(at..at, word.iter().copied());
            }
            _ => {
                let from = random.below(other.len());
                let end = (from + random.below(200)).min(other.len());
                bytes.splice(at..at, other[from..end].iter().copied());
            }
        }
    }
    bytes
}

/// The archive without checksums, so that readers go on where they would find damage.
fn without_crc(mut bytes: Vec<u8>) -> Vec<u8> {
    for at in 0..bytes.len().saturating_sub(46) {
        if bytes[at..].starts_with(b"PK\x01\x02") {
            bytes[at + 16..at + 20].fill(0);
        }
    }
    bytes
}

/// A file in memory, which checks that no byte outside of it is read.
#[derive(Debug)]
struct InMemory(Vec<u8>);

impl Ranges for InMemory {
    fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
        let from = self.0.get(start as usize..start as usize + to.len());
        to.copy_from_slice(from.ok_or_else(|| Error::damaged("a range outside of the file"))?);
        Ok(())
    }
}

/// What was decoded, with maps in the order of their keys.
fn shown(decoded: &Result<Dcp>) -> String {
    let shapes = decoded.as_ref().map(|dcp| {
        let shapes: BTreeMap<_, _> = dcp.original_shapes.iter().collect();
        format!(
            "{:?} {:?} {:?} {:?} {shapes:?}",
            dcp.files, dcp.transforms, dcp.tensors, dcp.objects
        )
    });
    format!("{shapes:?}")
}

/// Reads a file in each way in which its bytes can be read; returns whether it has regions of tensors.
fn read(bytes: Vec<u8>, is_metadata: bool) -> bool {
    if is_metadata {
        let decoded = Dcp::decode(&bytes);
        let plainly = Pickle::decode(&bytes).and_then(|pickle| Dcp::of(&pickle));
        assert_eq!(shown(&decoded), shown(&plainly));
        if let Ok(dcp) = decoded {
            let _ = index_of(
                &std::sync::Arc::new(dcp),
                Path::new("/nowhere"),
                Method::Auto,
            );
            let _ = paths(&bytes);
        }
        return false;
    }
    if bytes.first() == Some(&0x80) {
        let _ = Pickle::decode(&bytes);
    }
    let n_bytes = bytes.len() as u64;
    let source = Source::of_ranges(PathBuf::from("fuzz"), n_bytes, Box::new(InMemory(bytes)));
    let Ok(file) = TorchFile::read(Window::whole(&source)) else {
        return false;
    };
    let Ok(leaves) = file.leaves() else {
        return false;
    };
    let mut has_regions = false;
    let mut meshes = Meshes::new(1);
    for (_, leaf) in leaves {
        if let Leaf::Sharded(sharded) = &leaf
            && let Ok(offset) = file.part_offset("w", sharded, &mut meshes)
        {
            let mut ends = offset.iter().zip(&sharded.local.shape).zip(&sharded.shape);
            assert!(ends.all(|((at, n), of)| at + n <= *of));
        }
        let tensors = match leaf {
            Leaf::Tensor(tensor) | Leaf::Sharded(Sharded { local: tensor, .. }) => vec![tensor],
            Leaf::Regions(regions) => {
                has_regions = true;
                let n_dims = regions.shape.len();
                for (offset, tensor) in &regions.held {
                    assert_eq!((tensor.dtype, tensor.shape.len()), (regions.dtype, n_dims));
                    let mut ends = offset.iter().zip(&tensor.shape).zip(&regions.shape);
                    assert!(ends.all(|((at, n), of)| at + n <= *of));
                }
                assert!(regions.all.len() % (2 * n_dims.max(1)) == 0);
                assert!(regions.rank < regions.n_ranks);
                regions.held.into_iter().map(|(_, tensor)| tensor).collect()
            }
            Leaf::Other(_) => vec![],
        };
        for tensor in tensors {
            // Every element of a tensor that is handed out lies in its storage, and the storage in the file.
            let storage = &file.storages()[tensor.storage];
            assert!(storage.start + storage.n_bytes <= n_bytes);
            if !tensor.shape.contains(&0) {
                let dims = tensor.shape.iter().zip(&tensor.strides);
                let last = dims.fold(tensor.offset, |at, (extent, stride)| {
                    at + (extent - 1) * stride
                });
                assert!((last + 1) * tensor.dtype.unit().1 <= storage.n_bytes);
            }
        }
    }
    has_regions
}

fn samples() -> Vec<(Vec<u8>, bool)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/torch");
    let mut folders = vec![folder];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            let name = entry.file_name().into_string().unwrap();
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() && entry.metadata().unwrap().len() < 40_000 {
                let is_metadata = name.ends_with(".metadata");
                let ends = [".pt", ".pkl", ".bin", ".distcp", ".pth"];
                if is_metadata || ends.iter().any(|end| name.ends_with(end)) {
                    found.push((path, is_metadata));
                }
            }
        }
    }
    found.sort();
    let found = found.into_iter();
    found
        .map(|(path, is_metadata)| (std::fs::read(path).unwrap(), is_metadata))
        .collect()
}

/// What a `ShardedTensor` consists of, and numbers and containers of a pickle.
const REGION_WORDS: &[&[u8]] = &[
    b"K\0",
    b"K\x01",
    b"K\x05",
    b"K\xff",
    b"J\xff\xff\xff\x7f",
    b"J\xff\xff\xff\xff",
    b"N",
    b"\x88",
    b")",
    b"]",
    b"}",
    b"(",
    b"\x85",
    b"\x86",
    b"R",
    b"\x81",
    b"b",
    b"a",
    b"e",
    b"s",
    b"h\x05",
    b"h\x26",
    b"q\x01",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"shard_sizes",
    b"size",
    b"tensor",
    b"metadata",
    b"ShardMetadata\n",
    b"Shard\n",
    b"float64\n",
    b"getattr\n",
    b"global_rank",
    b"ProcessGroupState",
];

/// Changes a pickle, and keeps its length, so that the archive around it stays what it is.
fn changed_in_place(pickle: &mut [u8], random: &mut Random) {
    for _ in 0..=random.below(3) {
        let at = random.below(pickle.len());
        match random.below(5) {
            0 => pickle[at] = random.next() as u8,
            1 => pickle[at] ^= 1 << random.below(8),
            2 => {
                let word = REGION_WORDS[random.below(REGION_WORDS.len())];
                let end = (at + word.len()).min(pickle.len());
                pickle[at..end].copy_from_slice(&word[..end - at]);
            }
            3 => {
                let n = random.below(40).min(pickle.len() - at);
                pickle.copy_within(at..at + n, random.below(pickle.len() - n));
            }
            _ => {
                // A number becomes another one.
                let numbers: Vec<usize> = (1..pickle.len())
                    .filter(|i| pickle[i - 1] == b'K')
                    .collect();
                pickle[numbers[random.below(numbers.len())]] =
                    [0, 1, 2, 3, 4, 5, 127, 255][random.below(8)];
            }
        }
    }
}

#[test]
fn mutated_sharded_tensors_are_refused_or_regions_inside_of_their_tensors() {
    let runs = std::env::var("RESHARD_FUZZ_RUNS").map_or(RUNS, |runs| runs.parse().unwrap());
    let holds = |bytes: &[u8], word: &[u8]| bytes.windows(word.len()).any(|one| one == word);
    let samples: Vec<_> = samples()
        .into_iter()
        .map(|(bytes, _)| without_crc(bytes))
        .filter(|bytes| {
            bytes.starts_with(b"PK") && holds(bytes, b"sharded_tensor.api\nShardedTensor")
        })
        .map(|bytes| {
            let start = bytes
                .windows(3)
                .position(|one| one == b"\x80\x02c")
                .unwrap();
            let end = bytes.windows(3).position(|one| one == b"sb.").unwrap();
            (bytes, start, end)
        })
        .collect();
    assert_eq!(samples.len(), 4);
    let n_read = std::sync::atomic::AtomicU64::new(0);
    let next = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let run = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if run >= runs {
                        break;
                    }
                    let mut random = Random(run);
                    let (bytes, start, end) = &samples[random.below(samples.len())];
                    let mut bytes = bytes.clone();
                    changed_in_place(&mut bytes[*start..*end], &mut random);
                    let n_bytes = bytes.len();
                    let mut is_read = false;
                    let held = most_held(|| is_read = read(bytes, false));
                    n_read.fetch_add(is_read.into(), std::sync::atomic::Ordering::Relaxed);
                    assert!(
                        held <= 2 * n_bytes + MORE_BYTES,
                        "run {run}: {held} bytes for {n_bytes}"
                    );
                }
            });
        }
    });
    let n_read = n_read.into_inner();
    assert!(n_read > runs / 100, "{n_read} of {runs} have regions");
}

#[test]
fn mutated_files_are_refused_or_read_within_their_bytes_and_bounded_memory() {
    let runs = std::env::var("RESHARD_FUZZ_RUNS").map_or(RUNS, |runs| runs.parse().unwrap());
    let samples = samples();
    assert!(samples.len() > 200, "{}", samples.len());
    let next = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let run = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if run >= runs {
                        break;
                    }
                    let mut random = Random(run);
                    let (bytes, is_metadata) = &samples[random.below(samples.len())];
                    let (other, _) = &samples[random.below(samples.len())];
                    let bytes = mutated(bytes, other, &mut random);
                    let bytes = if run.is_multiple_of(4) {
                        bytes
                    } else {
                        without_crc(bytes)
                    };
                    let n_bytes = bytes.len();
                    let held = most_held(|| {
                        read(bytes, *is_metadata);
                    });
                    assert!(
                        held <= 2 * n_bytes + MORE_BYTES,
                        "run {run}: {held} bytes for {n_bytes}"
                    );
                }
            });
        }
    });
}
