//! Benchmarks of the copy and the header parser, compared with memcpy and the safetensors crate. Criterion reports GiB/s.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use reshard_core::control::Control;
use reshard_core::copy::fill;
use reshard_core::dtype::Dtype;
use reshard_core::header::{Header, build};
use reshard_core::index::Index;
use reshard_core::memory::Stores;
use reshard_core::plan::{MemoryTensor, Plan};
use reshard_core::region::Region;
use reshard_core::request::Request;
use reshard_core::source::Method;
use reshard_core::team::Team;
use reshard_core::writer::{self, Buffers, Options};
use std::hint::black_box;

const ROWS: u64 = 16_384;
const COLUMNS: u64 = 4_096;

fn copy(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("w.safetensors");
    let content: Vec<u8> = (0..ROWS * COLUMNS * 2).map(|i| (i % 251) as u8).collect();
    let strides = vec![COLUMNS * 2, 2];
    let plan = Plan::of_memory(vec![MemoryTensor {
        name: "w",
        dtype: Dtype::Bf16,
        shape: &[ROWS, COLUMNS],
        bytes: &content,
        strides_bytes: strides,
    }])
    .unwrap();
    let options = Options {
        metadata: vec![],
        container: None,
        durable: false,
        direct: false,
        mode: 0o600,
    };
    writer::write(
        &path,
        &plan,
        &options,
        &mut Buffers::new(256 << 20).unwrap(),
        &Control::default(),
    )
    .unwrap();

    let mut group = criterion.benchmark_group("copy to warm memory");
    group.sample_size(20);
    let quarter = COLUMNS / 4;
    for (name, offset, shape) in [
        ("whole", [0, 0], [ROWS, COLUMNS]),
        ("row quarter", [ROWS / 4, 0], [ROWS / 4, COLUMNS]),
        ("column quarter", [0, quarter], [ROWS, quarter]),
    ] {
        let n_bytes = (shape[0] * shape[1] * 2) as usize;
        group.throughput(Throughput::Bytes(n_bytes as u64));
        let mut to = vec![0_u8; n_bytes];
        for method in [Method::Map, Method::Read] {
            let mut index = Index::new();
            let file = index.add_file(path.clone(), true, method);
            index.add_whole("w", file).unwrap();
            let mut request = Request::default();
            request.add_region(
                "w",
                "w",
                Region::new(offset.to_vec(), shape.to_vec()).unwrap(),
            );
            let plan = index.plan(&request, None, true).unwrap();
            group.bench_function(BenchmarkId::new(name, format!("{method:?}")), |bencher| {
                bencher.iter(|| {
                    fill(
                        &plan,
                        vec![&mut to],
                        Stores::Streaming,
                        &Control::default(),
                        &Team::current(),
                    )
                    .unwrap();
                });
            });
            let (row, column) = (shape[0] as usize - 1, 2 * (offset[1] as usize));
            let from = (offset[0] as usize + row) * COLUMNS as usize * 2 + column;
            let width = shape[1] as usize * 2;
            assert_eq!(
                to[row * width..],
                content[from..from + width],
                "the last row"
            );
        }
        group.bench_function(BenchmarkId::new(name, "memcpy, 1 thread"), |bencher| {
            bencher.iter(|| black_box(&mut to).copy_from_slice(black_box(&content[..n_bytes])));
        });
    }
    group.finish();
}

fn header(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("header");
    group.sample_size(20);
    for n in [10, 1_000, 50_000] {
        let names: Vec<_> = (0..n)
            .map(|i| format!("model.layers.{i}.self_attn.q_proj.weight"))
            .collect();
        let tensors: Vec<_> = names
            .iter()
            .map(|name| (name.as_str(), Dtype::Bf16, &[4_u64, 8][..]))
            .collect();
        let (bytes, _) = build(&tensors, &[], 64).unwrap();
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(BenchmarkId::new("reshard", n), |bencher| {
            bencher.iter(|| Header::parse(bytes[8..].to_vec(), n * 64).unwrap());
        });
        let mut file = bytes.clone();
        file.resize(bytes.len() + n as usize * 64, 0);
        group.bench_function(BenchmarkId::new("safetensors crate", n), |bencher| {
            bencher.iter(|| safetensors::SafeTensors::read_metadata(&file).unwrap());
        });
    }
    group.finish();
}

criterion_group!(benches, copy, header);
criterion_main!(benches);
