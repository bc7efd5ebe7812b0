//! Planning at scale: checks the coverage of 2,000 tensors on 16,384 ranks, and of 20,000 on 102,400, and plans one rank
//! of another layout. The same for flat parts of 20,000 tensors on 1,024 to 102,400 ranks.
//!
//! Prints time and peak memory, and compares the number of copies with the arithmetic of the layouts. Fails above one
//! second or 256 MiB. The large case is for optimized builds, and fails if the coverage alone takes a second, or above
//! 512 MiB.

#![expect(clippy::print_stdout, reason = "a bench prints its table")]

use reshard_core::dtype::Dtype;
use reshard_core::index::Index;
use reshard_core::joined::Joined;
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

fn layout(mesh: &Arc<Mesh>, shape: [u64; 2], cut: [&[usize]; 2]) -> Arc<Layout> {
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
    Arc::new(Layout::new(Arc::clone(mesh), shape.to_vec(), partition, &[]).unwrap())
}

/// A model on some ranks, and on as many of another mesh.
struct Case {
    n_tensors: usize,
    shape: [u64; 2],
    /// Sizes of the data and the tensor axis of the stored and of the wanted mesh.
    from: [u64; 2],
    to: [u64; 2],
    /// The axes that cut the rows and the columns of each third of the tensors.
    wanted: [[&'static [usize]; 2]; 3],
    is_large: bool,
}

/// Typical layouts of training: split by tensor parallelism and replicated; split by `ZeRO` as well; split on both dims.
const STORED: [[&[usize]; 2]; 3] = [[&[1], &[]], [&[1, 0], &[]], [&[0], &[1]]];

fn main() {
    measure(&Case {
        n_tensors: 2000,
        shape: [16_384, 8_192],
        from: [2048, 8],
        to: [1024, 16],
        wanted: [[&[], &[1]], [&[0], &[1]], [&[1], &[0]]],
        is_large: false,
    });
    if cfg!(debug_assertions) {
        return;
    }
    measure(&Case {
        n_tensors: 20_000,
        shape: [102_400, 6_400],
        from: [12_800, 8],
        to: [6_400, 16],
        wanted: [[&[], &[1]], [&[0], &[1]], [&[0], &[1]]],
        is_large: true,
    });
    for form in Form::ALL {
        measure_form(form);
    }
    for n_ranks in [1_024, 10_240, 102_400] {
        for form in Flat::ALL {
            measure_flat(form, n_ranks);
        }
    }
}

/// Other ways to lay out 20,000 tensors on 102,400 ranks. Each tensor has a shape of its own.
#[derive(Debug, Clone, Copy)]
enum Form {
    /// Each expert is on the ranks of one of 64 coordinates, and split there; wanted on 32 coordinates.
    Experts,
    /// Rows that no number of ranks divides, in parts as `torch.chunk` makes them.
    Uneven,
}

impl Form {
    const ALL: [Self; 2] = [Self::Experts, Self::Uneven];

    fn mesh(self, is_from: bool) -> Arc<Mesh> {
        let sizes: &[(&str, u64)] = match (self, is_from) {
            (Self::Experts, true) => &[("ep", 64), ("dp", 200), ("tp", 8)],
            (Self::Experts, false) => &[("ep", 32), ("dp", 200), ("tp", 16)],
            (_, true) => &[("dp", 12_800), ("tp", 8)],
            (_, false) => &[("dp", 6_400), ("tp", 16)],
        };
        let axes = sizes.iter().map(|&(name, size)| (name.to_owned(), size));
        Arc::new(Mesh::new(axes.collect(), None).unwrap())
    }

    fn layout(self, i: usize, mesh: &Arc<Mesh>) -> Arc<Layout> {
        let n = i as u64;
        let mut shape = vec![102_400 * (1 + n % 5), 6_400 * (1 + n % 4_000)];
        let (mut place, mut uneven) = (Vec::new(), Uneven::Refuse);
        let dims: [&[usize]; 2] = match self {
            Self::Experts => {
                place.push((vec![0], n % mesh.axes()[0].1));
                [&[2], &[]]
            }
            Self::Uneven => {
                shape[0] += 1 + n % 97;
                uneven = Uneven::Ceil;
                [&[0, 1], &[]]
            }
        };
        let dims = dims.map(|axes| DimPartition {
            axes: axes.to_vec(),
            ..DimPartition::default()
        });
        let partition = Partition {
            dims: dims.to_vec(),
            uneven,
            flat: None,
            stored: None,
        };
        Arc::new(Layout::new(Arc::clone(mesh), shape, partition, &place).unwrap())
    }
}

fn measure_form(form: Form) {
    let n_tensors = 20_000;
    let keys: Vec<_> = (0..n_tensors)
        .map(|i| format!("decoder.layers.{i}.mlp.linear_fc1.weight"))
        .collect();
    let (from, to) = (form.mesh(true), form.mesh(false));
    PEAK.store(NOW.load(Ordering::Relaxed), Ordering::Relaxed);
    let mut clock = Instant::now();
    let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed();
    let mut index = Index::new();
    let files: Arc<[u32]> = (0..from.n_points())
        .map(|rank| {
            let name = PathBuf::from(format!("model-{rank:07}.safetensors"));
            index.add_file(name, false, Method::default())
        })
        .collect();
    for (i, key) in keys.iter().enumerate() {
        let layout = form.layout(i, &from);
        index.add_layout(key, Dtype::Bf16, &layout, &files).unwrap();
    }
    let built = lap();
    index.check_coverage().unwrap();
    let checked = lap();
    let mut request = Request::default();
    for (i, key) in keys.iter().enumerate() {
        let layout = form.layout(i, &to);
        if layout.holds(777) {
            request.add(key, key, &layout, 777).unwrap();
        }
    }
    let n_copy_ops = index.count_copy_ops(&request).unwrap();
    let planned = lap();
    let peak_mib = PEAK.load(Ordering::Relaxed) >> 20;
    println!(
        "{form:?}: index {built:?}, coverage {checked:?}, plan of one rank ({n_copy_ops} copies) {planned:?}, peak \
         {peak_mib} MiB"
    );
    assert!(checked.as_secs_f64() < 1.0, "more than one second");
    assert!(peak_mib < 512, "more than 512 MiB");
}

/// Ways in which ranks divide the flattened states of 20,000 tensors.
#[derive(Debug, Clone, Copy)]
enum Flat {
    /// Each tensor alone, over all ranks but those of tensor parallelism.
    Alone,
    /// One buffer with all tensors, over all ranks, as the first two stages of `ZeRO` have.
    Zero,
    /// Buffers of 40 million elements and more, divided over the ranks of data parallelism of each tensor-parallel rank,
    /// as the distributed optimizer of Megatron-Core has.
    Buckets,
}

impl Flat {
    const ALL: [Self; 3] = [Self::Alone, Self::Zero, Self::Buckets];
    const N_TENSORS: u64 = 20_000;

    fn shape(n: u64) -> [u64; 2] {
        [2_048 * (1 + n % 5), 1_000 + n % 97]
    }

    fn layout(n: u64, mesh: &Arc<Mesh>, is_split: bool) -> Arc<Layout> {
        let mut dims = vec![DimPartition::default(); 2];
        if is_split {
            dims[0].axes.push(1);
        }
        let partition = Partition {
            dims,
            uneven: Uneven::Refuse,
            flat: Some(if is_split { vec![0] } else { vec![0, 1] }),
            stored: None,
        };
        let shape = Self::shape(n).to_vec();
        Arc::new(Layout::new(Arc::clone(mesh), shape, partition, &[]).unwrap())
    }

    /// The tensors of each array, with their layouts.
    fn arrays(self, mesh: &Arc<Mesh>) -> Vec<Vec<(String, Arc<Layout>)>> {
        let mut arrays: Vec<Vec<_>> = Vec::new();
        let mut n_elements = u64::MAX;
        for n in 0..Self::N_TENSORS {
            let is_next = match self {
                Self::Alone => true,
                Self::Zero => n == 0,
                Self::Buckets => n_elements >= 40_000_000,
            };
            if is_next {
                arrays.push(Vec::new());
                n_elements = 0;
            }
            let layout = Self::layout(n, mesh, !matches!(self, Self::Zero));
            n_elements += Self::shape(n).iter().product::<u64>();
            let key = format!("decoder.layers.{n}.mlp.linear_fc1.weight");
            arrays.last_mut().unwrap().push((key, layout));
        }
        arrays
    }

    fn joined(self, mesh: &Arc<Mesh>) -> Vec<Arc<Joined>> {
        let arrays = self.arrays(mesh).into_iter().enumerate();
        let joined = arrays.map(|(i, keys)| Joined::new(format!("buffer.{i}"), keys, 64).unwrap());
        joined.map(Arc::new).collect()
    }
}

fn measure_flat(form: Flat, n_ranks: u64) {
    let mesh = |tp: u64| {
        let axes = vec![("dp".to_owned(), n_ranks / tp), ("tp".to_owned(), tp)];
        Arc::new(Mesh::new(axes, None).unwrap())
    };
    let (from, to) = (mesh(8), mesh(16));
    PEAK.store(NOW.load(Ordering::Relaxed), Ordering::Relaxed);
    let mut clock = Instant::now();
    let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed();
    let mut index = Index::new();
    let file = |rank| {
        let name = PathBuf::from(format!("model-{rank:07}.safetensors"));
        index.add_file(name, false, Method::default())
    };
    let files: Arc<[u32]> = (0..from.n_points()).map(file).collect();
    if matches!(form, Flat::Alone) {
        for (key, layout) in form.arrays(&from).iter().flatten() {
            index.add_layout(key, Dtype::F32, layout, &files).unwrap();
        }
    } else {
        for joined in form.joined(&from) {
            index.add_joined(Dtype::F32, &joined, &files).unwrap();
        }
    }
    let built = lap();
    index.check_coverage().unwrap();
    let checked = lap();
    let rank = n_ranks / 2 + 77;
    let mut request = Request::default();
    if matches!(form, Flat::Alone) {
        for (key, layout) in form.arrays(&to).iter().flatten() {
            request.add(key, key, layout, rank).unwrap();
        }
    } else {
        for joined in form.joined(&to) {
            request.add_joined(&joined, rank).unwrap();
        }
    }
    let requested = lap();
    let n_copy_ops = index.count_copy_ops(&request).unwrap();
    let planned = lap();
    // All of the weights of one tensor-parallel rank of sixteen, as another program has them.
    let whole =
        Arc::new(Mesh::new(vec![("dp".to_owned(), 1), ("tp".to_owned(), 16)], None).unwrap());
    let mut n_of_weights = 0;
    let most = if matches!(form, Flat::Zero) {
        Flat::N_TENSORS
    } else {
        100
    };
    for n in 0..most {
        let layout = layout(&whole, Flat::shape(n), [&[1], &[]]);
        let key = format!("decoder.layers.{n}.mlp.linear_fc1.weight");
        let mut request = Request::default();
        request.add(&key, &key, &layout, 7).unwrap();
        n_of_weights += index.count_copy_ops(&request).unwrap();
    }
    let of_weights = lap();
    let peak_mib = PEAK.load(Ordering::Relaxed) >> 20;
    println!(
        "{form:?}, {n_ranks} ranks: index {built:?}, coverage {checked:?}, request of one rank {requested:?} and its \
         plan ({n_copy_ops} copies) {planned:?}, weights of {most} tensors ({n_of_weights} copies) {of_weights:?}, peak \
         {peak_mib} MiB"
    );
    assert!(checked.as_secs_f64() < 1.0, "more than one second");
    assert!(peak_mib < 512, "more than 512 MiB");
}

fn measure(case: &Case) {
    let axes = |[dp, tp]: [u64; 2]| vec![("dp".to_owned(), dp), ("tp".to_owned(), tp)];
    let from = Arc::new(Mesh::new(axes(case.from), None).unwrap());
    let to = Arc::new(Mesh::new(axes(case.to), None).unwrap());
    let stored = STORED.map(|cut| layout(&from, case.shape, cut));
    let wanted = case.wanted.map(|cut| layout(&to, case.shape, cut));
    let keys: Vec<_> = (0..case.n_tensors)
        .map(|i| format!("decoder.layers.{i}.mlp.linear_fc1.weight"))
        .collect();
    let n_ranks = from.n_points();
    PEAK.store(NOW.load(Ordering::Relaxed), Ordering::Relaxed);

    let mut clock = Instant::now();
    let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed();
    let mut index = Index::new();
    let files: Arc<[u32]> = (0..n_ranks)
        .map(|rank| {
            index.add_file(
                PathBuf::from(format!("model-{rank:07}-{n_ranks:07}.safetensors")),
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

    // The parts of each dim: the stored ones that overlap one that is wanted.
    let n_parts =
        |cut: &[usize], sizes: [u64; 2]| cut.iter().map(|&axis| sizes[axis]).product::<u64>();
    let of_tensor = |i: usize| -> u64 {
        (0..2)
            .map(|dim| {
                let wanted = n_parts(case.wanted[i % 3][dim], case.to);
                u64::max(n_parts(STORED[i % 3][dim], case.from) / wanted, 1)
            })
            .product()
    };
    let expected: u64 = (0..case.n_tensors).map(of_tensor).sum();
    assert_eq!(n_copy_ops as u64, expected);
    println!(
        "{n_ranks} ranks x {} tensors, {} shards",
        case.n_tensors,
        n_ranks * case.n_tensors as u64
    );
    println!(
        "index {built:?}, coverage {checked:?}, plan of one rank ({n_copy_ops} copies) {planned:?}"
    );
    let total = built + checked + planned;
    println!("total {total:?}, peak memory {peak_mib} MiB");
    let (bounded, max_mib) = if case.is_large {
        (checked, 512)
    } else {
        (total, 256)
    };
    assert!(bounded.as_secs_f64() < 1.0, "more than one second");
    assert!(peak_mib < max_mib, "more than {max_mib} MiB");
}
