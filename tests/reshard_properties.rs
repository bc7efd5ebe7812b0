//! The complete path of the core, compared with an oracle that moves one element at a time: random layouts as source
//! and destination, written to real files, planned, and copied by map and by positioned reads.

use proptest::prelude::*;
use reshard_core::control::Control;
use reshard_core::copy::fill;
use reshard_core::dtype::Dtype;
use reshard_core::index::Index;
use reshard_core::layout::{Block, DimPartition, Layout, Partition, Uneven};
use reshard_core::memory::Stores;
use reshard_core::mesh::Mesh;
use reshard_core::plan::{MemoryTensor, Plan};
use reshard_core::region::{Region, row_major_strides};
use reshard_core::request::Request;
use reshard_core::source::Method;
use reshard_core::stored::StoredTensor;
use reshard_core::team::Team;
use reshard_core::tile::Tile;
use reshard_core::writer::{self, Buffers, Options};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const DTYPES: [Dtype; 5] = [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::C64];

fn options() -> Options {
    Options {
        metadata: vec![],
        container: None,
        durable: false,
        direct: false,
        mode: 0o600,
    }
}

/// Drops a file from the page cache. File systems in memory keep it.
#[cfg(target_os = "linux")]
fn evict(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    file.sync_data().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

#[cfg(not(target_os = "linux"))]
fn evict(_path: &Path) {}

/// Random bytes that differ from element to element.
fn content(n_bytes: usize) -> Vec<u8> {
    (0..n_bytes as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

/// The local array of a position, element by element from its tiles; elements that no tile covers are zero.
fn local_array(layout: &Layout, position: u64, whole: &[u8], size: usize) -> Vec<u8> {
    let n: u64 = layout.local_shape(position).iter().product();
    let mut local = vec![0; n as usize * size];
    let mut is_written = vec![false; n as usize];
    for tile in layout.tiles(position) {
        let region = &tile.global;
        for mut k in 0..region.n_elements() {
            let mut global = vec![0; region.rank()];
            for d in (0..region.rank()).rev() {
                global[d] = region.offset()[d] + k % region.shape()[d];
                k /= region.shape()[d];
            }
            let from = global
                .iter()
                .zip(layout.shape())
                .fold(0, |at, (i, extent)| at * extent + i) as usize;
            let to = tile.local_at(&global) as usize;
            assert!(
                !std::mem::replace(&mut is_written[to], true),
                "a local element is written twice"
            );
            local[to * size..(to + 1) * size]
                .copy_from_slice(&whole[from * size..(from + 1) * size]);
        }
    }
    local
}

prop_compose! {
    /// A random layout of a shape over a mesh of up to 12 ranks. Invalid combinations are omitted.
    fn layouts(shape: Vec<u64>)(
        sizes in prop::collection::vec(1..4_u64, 0..3),
        uses in prop::collection::vec(0..7_usize, 3),
        kind in 0..4_usize,
        splits in prop::collection::vec(0..100_u64, 8),
        permute in any::<bool>(),
    ) -> Layout {
        let n = shape.len();
        let axes: Vec<_> = sizes.iter().enumerate().map(|(i, size)| (format!("axis{i}"), *size)).collect();
        let mesh = Arc::new(Mesh::new(axes, None).unwrap());
        let mut dims = vec![DimPartition::default(); n];
        let (mut flat, mut place) = (None, Vec::new());
        for (axis, size) in sizes.iter().enumerate() {
            match uses[axis] {
                use_ @ 0..=3 if n > 0 => dims[use_ % n].axes.push(axis),
                4 => flat.get_or_insert_with(Vec::new).push(axis),
                5 => place.push((vec![axis], splits[axis] % size)),
                _ => {}
            }
        }
        for (d, dim) in dims.iter_mut().enumerate() {
            let parts = mesh.n_folded(&dim.axes);
            if kind == 1 {
                let mut bounds: Vec<u64> = (1..parts).map(|k| splits[k as usize % 8] % (shape[d] + 1)).collect();
                bounds.extend([0, shape[d]]);
                bounds.sort_unstable();
                dim.sizes = Some(bounds.windows(2).map(|pair| pair[1] - pair[0]).collect());
            } else if kind == 2 {
                let first = splits[d] % (shape[d] + 1);
                dim.blocks = Some(vec![
                    Block { size: first, is_cut: true },
                    Block { size: shape[d] - first, is_cut: splits[7] % 2 == 0 },
                ]);
            }
        }
        let stored = permute.then(|| (0..n).rev().collect());
        let partition = Partition { dims, uneven: Uneven::Ceil, flat, stored };
        Layout::new(mesh, shape.clone(), partition, &place).unwrap()
    }
}

fn cases() -> impl Strategy<Value = (Arc<Layout>, Layout, Dtype)> {
    let extent = prop_oneof![3 => 1..12_u64, 1 => Just(0_u64), 1 => Just(17), 1 => Just(64)];
    prop::collection::vec(extent, 0..5)
        .prop_filter("small", |shape| shape.iter().product::<u64>() <= 20_000)
        .prop_flat_map(|shape| (layouts(shape.clone()), layouts(shape), 0..DTYPES.len()))
        .prop_map(|(from, to, dtype)| (Arc::new(from), to, DTYPES[dtype]))
}

/// A tensor with factored dims, partitioned into cells in the factored dims.
#[derive(Debug, Clone)]
struct Factored {
    shape: Vec<u64>,
    factors: BTreeMap<usize, Vec<u64>>,
    /// The factors of all dims, one after the other.
    dims: Vec<u64>,
    /// The bounds of the cells, one list per factored dim.
    bounds: Vec<Vec<u64>>,
    /// `order[j]` is the factored dim at storage position `j`.
    order: Vec<usize>,
}

fn factored() -> impl Strategy<Value = Factored> {
    let factors = prop::collection::vec(prop::collection::vec(1..6_u64, 1..4), 0..4);
    let small = factors.prop_filter("small", |all| {
        all.iter().flatten().product::<u64>() <= 4_000
    });
    small.prop_flat_map(|all| {
        let dims = all.concat();
        let order = Just((0..dims.len()).collect::<Vec<_>>()).prop_shuffle();
        let cuts = prop::collection::vec(prop::collection::vec(0..6_u64, 0..3), dims.len());
        (Just(all), order, cuts).prop_map(|(all, order, cuts)| {
            let dims = all.concat();
            let bounds = cuts.into_iter().zip(&dims).map(|(mut cuts, &n)| {
                for cut in &mut cuts {
                    *cut %= n + 1;
                }
                cuts.extend([0, n]);
                cuts.sort_unstable();
                cuts.dedup();
                cuts
            });
            Factored {
                shape: all.iter().map(|own| own.iter().product()).collect(),
                bounds: bounds.collect(),
                // For a dim of one factor the entry is optional.
                factors: (0..)
                    .zip(all)
                    .filter(|(dim, own)| own.len() > 1 || dim % 2 == 0)
                    .collect(),
                dims,
                order,
            }
        })
    })
}

impl Factored {
    /// Writes all cells to one file, each as an array in storage order, and returns their tiles.
    fn write(
        &self,
        path: &Path,
        whole: &[u8],
        size: usize,
        dtype: Dtype,
    ) -> Vec<(String, Vec<u64>, Tile)> {
        let mut regions = vec![Region::whole(&[])];
        for bounds in &self.bounds {
            regions = regions
                .iter()
                .flat_map(|region| {
                    bounds.windows(2).map(|pair| {
                        let offset = [region.offset(), &[pair[0]]].concat();
                        Region::new(offset, [region.shape(), &[pair[1] - pair[0]]].concat())
                            .unwrap()
                    })
                })
                .collect();
        }
        let weights = row_major_strides(&self.dims);
        let mut found = Vec::new();
        let mut contents = Vec::new();
        for (number, region) in regions.into_iter().enumerate() {
            let shape: Vec<u64> = self.order.iter().map(|&d| region.shape()[d]).collect();
            let storage = row_major_strides(&shape);
            let mut bytes = Vec::new();
            for k in 0..region.n_elements() {
                let at: u64 = (0..shape.len())
                    .map(|j| {
                        let d = self.order[j];
                        (region.offset()[d] + k / storage[j] % shape[j]) * weights[d]
                    })
                    .sum();
                bytes.extend(&whole[at as usize * size..][..size]);
            }
            let mut local_strides = vec![0; shape.len()];
            for (j, &d) in self.order.iter().enumerate() {
                local_strides[d] = storage[j];
            }
            let tile = Tile {
                global: region,
                local_offset: 0,
                local_strides,
            };
            contents.push((shape.clone(), bytes));
            found.push((format!("cell{number}"), shape, tile));
        }
        let tensors = found
            .iter()
            .zip(&contents)
            .map(|((name, ..), (shape, bytes))| MemoryTensor {
                name,
                dtype,
                shape,
                bytes,
                strides_bytes: row_major_strides(shape)
                    .iter()
                    .map(|stride| stride * size as u64)
                    .collect(),
            });
        let plan = Plan::of_memory(tensors).unwrap();
        let mut buffers = Buffers::new(writer::MIN_MEMORY_BYTES).unwrap();
        writer::write(path, &plan, &options(), &mut buffers, &Control::default()).unwrap();
        found
    }
}

fn factored_cases() -> impl Strategy<Value = (Factored, Layout, Dtype)> {
    factored().prop_flat_map(|from| {
        let to = layouts(from.shape.clone());
        (Just(from), to, 0..DTYPES.len()).prop_map(|(from, to, dtype)| (from, to, DTYPES[dtype]))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_layout_to_any_layout((from, to, dtype) in cases(), is_cold in prop::bool::weighted(0.1)) {
        let size = (dtype.bits() / 8) as usize;
        let whole = content(from.shape().iter().product::<u64>() as usize * size);
        let folder = tempfile::tempdir().unwrap();
        for (method, stores) in [(Method::Map, Stores::Fresh), (Method::Read, Stores::Streaming), (Method::Auto, Stores::Plain), (Method::Auto, Stores::Streaming)] {
            let mut index = Index::new();
            let mut files = Vec::new();
            for position in 0..from.mesh().n_points() {
                let path = folder.path().join(format!("{position}.safetensors"));
                if method == Method::Map && from.holds(position) {
                    let local = local_array(&from, position, &whole, size);
                    let shape = from.local_shape(position);
                    let mut strides: Vec<u64> = row_major_strides(&shape);
                    for stride in &mut strides { *stride *= size as u64; }
                    let tensor = MemoryTensor { name: "w", dtype, shape: &shape, bytes: &local, strides_bytes: strides };
                    let plan = Plan::of_memory(vec![tensor]).unwrap();
                    let mut buffers = Buffers::new(writer::MIN_MEMORY_BYTES).unwrap();
                    let written = writer::write(&path, &plan, &options(), &mut buffers, &Control::default()).unwrap();
                    prop_assert_eq!(written.n_bytes(), std::fs::metadata(&path).unwrap().len());
                }
                files.push(index.add_file(path, false, method));
            }
            index.add_layout("w", dtype, &from, &files.into()).unwrap();
            index.check().unwrap();
            for position in to.holders() {
                let expected = local_array(&to, position, &whole, size);
                let mut request = Request::default();
                request.add("w", "w", &to, position).unwrap();
                let plan = index.plan(&request, None, true).unwrap();
                for holder in (0..from.mesh().n_points()).filter(|holder| is_cold && from.holds(*holder)) {
                    evict(&folder.path().join(format!("{holder}.safetensors")));
                }
                // The complete buffer, padding included, is overwritten.
                let mut found = vec![0xA5; expected.len()];
                let control = Control::default();
                fill(&plan, vec![&mut found], stores, &control, &Team::current()).unwrap();
                prop_assert_eq!(control.done_bytes(), expected.len() as u64);
                prop_assert_eq!(&found, &expected);
            }
        }
    }

    #[test]
    fn factored_tiles_to_any_layout((from, to, dtype) in factored_cases()) {
        let size = (dtype.bits() / 8) as usize;
        let whole = content(from.shape.iter().product::<u64>() as usize * size);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cells.safetensors");
        let cells = from.write(&path, &whole, size, dtype);
        let mut index = Index::new();
        let file = index.add_file(path, false, Method::Map);
        let stored = |(name, shape, tile): &(String, Vec<u64>, Tile)| {
            (StoredTensor { file, name: name.clone(), shape: shape.clone() }, vec![tile.clone()])
        };
        let all: Vec<_> = cells.iter().map(stored).collect();
        index.add_tiles("w", dtype, from.shape.clone(), from.factors.clone(), all.clone(), false).unwrap();
        // The listed arrays give the same tensor without factors.
        let listed = index.stored_arrays("w").unwrap();
        index.add_tiles("again", dtype, from.shape.clone(), BTreeMap::new(), listed, false).unwrap();
        index.check().unwrap();
        for (key, position) in to.holders().flat_map(|position| [("w", position), ("again", position)]) {
            let expected = local_array(&to, position, &whole, size);
            let mut request = Request::default();
            request.add("w", key, &to, position).unwrap();
            let mut found = vec![0xA5; expected.len()];
            let plan = index.plan(&request, None, true).unwrap();
            fill(&plan, vec![&mut found], Stores::Streaming, &Control::default(), &Team::current()).unwrap();
            prop_assert_eq!(&found, &expected);
        }
        // Without one cell the tensor is not covered; the error names a region inside the missing cell.
        let mut holed = Index::new();
        holed.add_file(folder.path().join("cells.safetensors"), false, Method::Map);
        holed.add_tiles("w", dtype, from.shape.clone(), from.factors.clone(), all[1..].to_vec(), false).unwrap();
        prop_assert_eq!(holed.check_coverage().unwrap_err().kind(), reshard_core::Kind::Coverage);
    }
}
