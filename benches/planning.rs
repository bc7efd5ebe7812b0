//! Planning at scale: checks the coverage of 2,000 tensors on 16,384 ranks, and plans one rank of another layout.
//!
//! Prints time and peak memory, and compares the number of copies with the arithmetic of the layouts. Fails above one
//! second or 256 MiB.

#![expect(clippy::print_stdout, reason = "a bench prints its table")]

use reshard_core::dtype::Dtype;
use reshard_core::index::Index;
use reshard_core::layout::{DimPartition, Layout, Partition, Uneven};
use reshard_core::mesh::Mesh;
use reshard_core::request::Request;
use reshard_core::source::Method;
use std::alloc::{GlobalAlloc, Layout as AllocLayout, System};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[expect(unsafe_code, reason = "an allocator that counts")]
// SAFETY: every call is forwarded to the system allocator unchanged; the counters do not access its memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: AllocLayout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller fulfils the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: AllocLayout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the contract of `dealloc`, which is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const N_TENSORS: usize = 2000;

fn layout(mesh: &Arc<Mesh>, cut: [&[usize]; 2]) -> Arc<Layout> {
    let dims = cut
        .map(|axes| DimPartition {
            axes: axes.to_vec(),
            ..DimPartition::default()
        })
        .to_vec();
    let partition = Partition {
        dims,
        uneven: Uneven::Refuse,
        flat: None,
        stored: None,
    };
    let shape = vec![16_384, 8_192];
    Arc::new(Layout::new(Arc::clone(mesh), shape, partition, &[]).unwrap())
}

fn main() {
    let axes = |sizes: [u64; 2]| vec![("dp".to_owned(), sizes[0]), ("tp".to_owned(), sizes[1])];
    let from = Arc::new(Mesh::new(axes([2048, 8]), None).unwrap());
    let to = Arc::new(Mesh::new(axes([1024, 16]), None).unwrap());
    // Typical layouts of training: split by tensor parallelism and replicated; split by ZeRO as well; split on both
    // dims.
    let stored = [
        layout(&from, [&[1], &[]]),
        layout(&from, [&[1, 0], &[]]),
        layout(&from, [&[0], &[1]]),
    ];
    let wanted = [
        layout(&to, [&[], &[1]]),
        layout(&to, [&[0], &[1]]),
        layout(&to, [&[1], &[0]]),
    ];
    let keys: Vec<_> = (0..N_TENSORS)
        .map(|i| format!("decoder.layers.{i}.mlp.linear_fc1.weight"))
        .collect();

    let mut clock = Instant::now();
    let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed();
    let mut index = Index::new();
    let files: Arc<[u32]> = (0..from.n_points())
        .map(|rank| {
            index.add_file(
                PathBuf::from(format!("model-{rank:07}-0016384.safetensors")),
                false,
                Method::default(),
            )
        })
        .collect();
    for (i, key) in keys.iter().enumerate() {
        index
            .add_layout(key, Dtype::Bf16, &stored[i % 3], &files)
            .unwrap();
    }
    let built = lap();
    index.check_coverage().unwrap();
    let checked = lap();
    let mut request = Request::default();
    for (i, key) in keys.iter().enumerate() {
        request.add(key, key, &wanted[i % 3], 777).unwrap();
    }
    let n_copy_ops = index.count_copy_ops(&request).unwrap();
    let planned = lap();
    let peak_mib = PEAK.load(Ordering::Relaxed) >> 20;

    let expected: usize = (0..N_TENSORS)
        .map(|i| {
            // Cells of the stored grid that overlap the requested region, per dim.
            let (rows, columns) = [(8, 1), (16_384, 1), (2_048, 8)][i % 3];
            let (wanted_rows, wanted_columns) = [(1, 16), (1024, 16), (16, 1024)][i % 3];
            usize::max(rows / wanted_rows, 1) * usize::max(columns / wanted_columns, 1)
        })
        .sum();
    assert_eq!(n_copy_ops, expected);
    println!(
        "16,384 ranks x {N_TENSORS} tensors, {} shards",
        16_384 * N_TENSORS
    );
    println!(
        "index {built:?}, coverage {checked:?}, plan of one rank ({n_copy_ops} copies) {planned:?}"
    );
    let total = built + checked + planned;
    println!("total {total:?}, peak memory {peak_mib} MiB");
    assert!(total.as_secs_f64() < 1.0, "more than one second");
    assert!(peak_mib < 256, "more than 256 MiB");
}
