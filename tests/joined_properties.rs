//! Joined arrays, compared with an oracle that lays one element after the other: random layouts of several tensors as
//! source and destination. What is computed for a rank is also compared with the list of all tiles.

use proptest::prelude::*;
use reshard_core::control::Control;
use reshard_core::copy::fill;
use reshard_core::dtype::Dtype;
use reshard_core::index::Index;
use reshard_core::joined::Joined;
use reshard_core::layout::{Block, DimPartition, Layout, Partition, Uneven};
use reshard_core::memory::Stores;
use reshard_core::mesh::Mesh;
use reshard_core::plan::{MemoryTensor, Plan};
use reshard_core::request::Request;
use reshard_core::source::Method;
use reshard_core::team::Team;
use reshard_core::tile::Tile;
use reshard_core::writer::{self, Buffers, Options};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const NAME: &str = "buffer";

/// An element of a tensor: the number of the tensor, and of the element in row-major order.
type Element = (u32, u64);

/// Tensors that are joined, and the same layouts without `flat`.
#[derive(Debug)]
struct Case {
    joined: Arc<Joined>,
    blocks: Vec<Layout>,
    align: u64,
    flat: Vec<usize>,
}

/// What the layout of one tensor is made of.
#[derive(Debug, Clone)]
struct Cut {
    /// For each axis that is not flat its use: a dim, a place, or none.
    uses: Vec<usize>,
    kind: usize,
    splits: Vec<u64>,
    is_permuted: bool,
}

fn cuts() -> impl Strategy<Value = Cut> {
    let splits = prop::collection::vec(0..100_u64, 8);
    (
        prop::collection::vec(0..6_usize, 4),
        0..4_usize,
        splits,
        any::<bool>(),
    )
        .prop_map(|(uses, kind, splits, is_permuted)| Cut {
            uses,
            kind,
            splits,
            is_permuted,
        })
}

fn layout(mesh: &Arc<Mesh>, shape: &[u64], cut: &Cut, flat: &[usize], is_flat: bool) -> Layout {
    let n = shape.len();
    let mut dims = vec![DimPartition::default(); n];
    let mut place = Vec::new();
    for axis in (0..mesh.axes().len()).filter(|axis| !flat.contains(axis)) {
        match cut.uses[axis] {
            use_ @ 0..=2 if n > 0 => dims[use_ % n].axes.push(axis),
            3 => place.push((vec![axis], cut.splits[axis] % mesh.size(axis))),
            _ => {}
        }
    }
    for (d, dim) in dims.iter_mut().enumerate() {
        let parts = mesh.n_folded(&dim.axes);
        if cut.kind == 1 {
            let bounds = (1..parts).map(|k| cut.splits[k as usize % 8] % (shape[d] + 1));
            let mut bounds: Vec<u64> = bounds.chain([0, shape[d]]).collect();
            bounds.sort_unstable();
            dim.sizes = Some(bounds.windows(2).map(|pair| pair[1] - pair[0]).collect());
        } else if cut.kind == 2 {
            let first = cut.splits[d] % (shape[d] + 1);
            let is_cut = cut.splits[7].is_multiple_of(2);
            dim.blocks = Some(vec![
                Block {
                    size: first,
                    is_cut: true,
                },
                Block {
                    size: shape[d] - first,
                    is_cut,
                },
            ]);
        }
    }
    let partition = Partition {
        dims,
        uneven: Uneven::Ceil,
        flat: is_flat.then(|| flat.to_vec()),
        stored: cut.is_permuted.then(|| (0..n).rev().collect()),
    };
    Layout::new(Arc::clone(mesh), shape.to_vec(), partition, &place).unwrap()
}

fn joins(shapes: Vec<Vec<u64>>) -> impl Strategy<Value = Case> {
    let sizes = prop::collection::vec(1..5_u64, 1..4);
    let n = shapes.len();
    (
        sizes,
        0..3_usize,
        any::<bool>(),
        prop::collection::vec(cuts(), n),
        1..5_u64,
    )
        .prop_map(move |(sizes, flat, is_two, cuts, align)| {
            let axes = sizes.iter().enumerate();
            let axes = axes.map(|(i, size)| (format!("axis{i}"), *size)).collect();
            let mesh = Arc::new(Mesh::new(axes, None).unwrap());
            let mut flat = vec![flat % sizes.len()];
            if is_two && sizes.len() > 1 {
                flat.insert(0, (flat[0] + 1) % sizes.len());
            }
            let tensors = || shapes.iter().zip(&cuts);
            let keys = tensors().enumerate().map(|(i, (shape, cut))| {
                (
                    format!("t{i}"),
                    Arc::new(layout(&mesh, shape, cut, &flat, true)),
                )
            });
            let joined = Joined::new(NAME.to_owned(), keys.collect(), align).unwrap();
            let blocks = tensors().map(|(shape, cut)| layout(&mesh, shape, cut, &flat, false));
            Case {
                joined: Arc::new(joined),
                blocks: blocks.collect(),
                align,
                flat,
            }
        })
}

fn cases() -> impl Strategy<Value = (Case, Case)> {
    let extent = prop_oneof![6 => 1..8_u64, 1 => Just(0_u64), 1 => Just(23)];
    let shape = prop::collection::vec(extent, 0..4)
        .prop_filter("small", |shape| shape.iter().product::<u64>() <= 1_000);
    prop::collection::vec(shape, 1..6)
        .prop_flat_map(|shapes| (joins(shapes.clone()), joins(shapes)))
}

/// Each element of a tile: its number in the tensor, and where it is in the local array.
fn elements(tile: &Tile, shape: &[u64]) -> Vec<(u64, u64)> {
    let region = &tile.global;
    let element = |mut k: u64| {
        let mut global = vec![0; region.rank()];
        for d in (0..region.rank()).rev() {
            global[d] = region.offset()[d] + k % region.shape()[d];
            k /= region.shape()[d];
        }
        let number = global
            .iter()
            .zip(shape)
            .fold(0, |at, (i, extent)| at * extent + i);
        (number, tile.local_at(&global))
    };
    (0..region.n_elements()).map(element).collect()
}

impl Case {
    /// The part of a position, element by element. `None`: it holds none of the tensors.
    fn part(&self, position: u64) -> Option<Vec<Option<Element>>> {
        let mut buffer: Vec<Option<Element>> = Vec::new();
        let held = self.blocks.iter().enumerate();
        let held: Vec<_> = held.filter(|(_, layout)| layout.holds(position)).collect();
        for (number, layout) in &held {
            while !(buffer.len() as u64).is_multiple_of(self.align) {
                buffer.push(None);
            }
            let n: u64 = layout.local_shape(position).iter().product();
            let mut block = vec![None; n as usize];
            for tile in layout.tiles(position) {
                for (element, at) in elements(&tile, layout.shape()) {
                    let known = block[at as usize].replace((*number as u32, element));
                    assert_eq!(known, None, "an element of a block is in two tiles");
                }
            }
            assert!(block.iter().all(Option::is_some));
            buffer.extend(block);
        }
        let mesh = self.joined.mesh();
        let n_parts = mesh.n_folded(&self.flat) as usize;
        while !buffer.len().is_multiple_of(n_parts * self.align as usize) {
            buffer.push(None);
        }
        let n = buffer.len() / n_parts;
        let first = mesh.fold(position, &self.flat) as usize * n;
        (!held.is_empty()).then(|| buffer[first..first + n].to_vec())
    }
}

fn bytes(part: &[Option<Element>]) -> Vec<u8> {
    let value = |element: &Option<Element>| element.map_or(0, |(t, i)| (t + 1) << 16 | i as u32);
    part.iter()
        .flat_map(|element| value(element).to_le_bytes())
        .collect()
}

/// The copies of a request for a tensor, as bytes.
fn filled(index: &Index, request: &Request, n: usize) -> Vec<u8> {
    let plan = index.plan(request, None, false).unwrap();
    let mut found = vec![0xA5; n];
    fill(
        &plan,
        vec![&mut found],
        Stores::Plain,
        &Control::default(),
        &Team::current(),
    )
    .unwrap();
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_part_of_a_rank_is_that_of_the_buffer((case, _) in cases()) {
        let positions = 0..case.joined.mesh().n_points();
        let mut equal: BTreeMap<Vec<Option<Element>>, Vec<u64>> = BTreeMap::new();
        for position in positions.clone() {
            let expected = case.part(position);
            let Some(found) = case.joined.part(position).unwrap() else {
                prop_assert_eq!(expected, None);
                continue;
            };
            let expected = expected.unwrap();
            let mut part: Vec<Option<Element>> = vec![None; found.n as usize];
            let mut is_padding = vec![true; found.n as usize];
            for (number, tile) in &found.tiles {
                for (element, at) in elements(tile, case.blocks[*number as usize].shape()) {
                    prop_assert_eq!(part[at as usize].replace((*number, element)), None);
                    is_padding[at as usize] = false;
                }
            }
            prop_assert_eq!(&part, &expected);
            let padding: Vec<u64> = found.padding.iter().flat_map(|&(from, to)| from..to).collect();
            let expected_padding = (0..found.n).filter(|&at| is_padding[at as usize]);
            prop_assert_eq!(padding, expected_padding.collect::<Vec<_>>());
            equal.entry(expected).or_default().push(position);
        }
        let groups = case.joined.groups(positions).unwrap();
        prop_assert!(groups.is_sorted_by_key(|(_, positions)| positions[0]));
        let groups: BTreeSet<_> = groups.into_iter().map(|(_, positions)| positions).collect();
        prop_assert_eq!(groups, equal.into_values().collect::<BTreeSet<_>>());
    }

    #[test]
    fn joined_to_joined((from, to) in cases()) {
        let folder = tempfile::tempdir().unwrap();
        let (mut index, mut files) = (Index::new(), Vec::new());
        let mut parts = Vec::new();
        for position in 0..from.joined.mesh().n_points() {
            let path = folder.path().join(format!("{position}.safetensors"));
            let part = from.part(position);
            if let Some(part) = &part {
                let (shape, bytes) = ([part.len() as u64], bytes(part));
                let tensor = MemoryTensor { name: NAME, dtype: Dtype::F32, shape: &shape, bytes: &bytes, strides_bytes: vec![4] };
                let plan = Plan::of_memory(vec![tensor]).unwrap();
                let options = Options { metadata: vec![], container: None, durable: false, direct: false, mode: 0o600 };
                let mut buffers = Buffers::new(writer::MIN_MEMORY_BYTES).unwrap();
                writer::write(&path, &plan, &options, &mut buffers, &Control::default()).unwrap();
            }
            parts.push(part);
            files.push(index.add_file(path, false, Method::Read));
        }
        let files: Arc<[u32]> = files.into();
        index.add_joined(Dtype::F32, &from.joined, &files).unwrap();
        prop_assert_eq!(index.check().unwrap(), vec![]);
        let mut listed = Index::new();
        for position in 0..from.joined.mesh().n_points() {
            listed.add_file(folder.path().join(format!("{position}.safetensors")), false, Method::Read);
        }
        for (number, layout) in from.blocks.iter().enumerate() {
            let key = format!("t{number}");
            // The arrays with elements of the tensor are listed, and their tiles.
            let has = |part: &Option<Vec<Option<Element>>>| part.iter().flatten().flatten().any(|(t, _)| *t == number as u32);
            let holders: Vec<u32> = (0..).zip(&parts).filter(|(_, part)| has(part)).map(|(file, _)| file).collect();
            if layout.shape().contains(&0) {
                prop_assert_eq!(index.holders(&key).unwrap().len(), 1);
            } else {
                prop_assert_eq!(index.holders(&key).unwrap(), holders);
            }
            for (tensor, tiles) in index.stored_arrays(&key).unwrap() {
                let part = parts[tensor.file as usize].as_ref().unwrap();
                prop_assert_eq!((&*tensor.name, &tensor.shape), (NAME, &vec![part.len() as u64]));
                let mut n = 0;
                for (element, at) in tiles.iter().flat_map(|tile| elements(tile, layout.shape())) {
                    prop_assert_eq!(part[at as usize], Some((number as u32, element)));
                    n += 1;
                }
                prop_assert_eq!(n, part.iter().flatten().filter(|(t, _)| *t == number as u32).count());
            }
            let stored = index.stored_arrays(&key).unwrap();
            listed.add_tiles(&key, Dtype::F32, layout.shape().to_vec(), BTreeMap::new(), stored, true).unwrap();
            prop_assert_eq!(index.shards(&key).unwrap(), listed.shards(&key).unwrap());
            let whole = to.blocks[number].shape();
            let all: Vec<_> = (0..whole.iter().product()).map(|i| Some((number as u32, i))).collect();
            let mut request = Request::default();
            request.add_region("all", &key, reshard_core::region::Region::whole(whole));
            prop_assert_eq!(&filled(&index, &request, all.len() * 4), &bytes(&all));
            for position in to.blocks[number].holders() {
                let mut request = Request::default();
                request.add("part", &key, &to.blocks[number], position).unwrap();
                let n: u64 = to.blocks[number].local_shape(position).iter().product();
                let found = filled(&index, &request, n as usize * 4);
                prop_assert_eq!(&found, &filled(&listed, &request, n as usize * 4));
            }
        }
        listed.check_coverage().unwrap();
        for position in 0..to.joined.mesh().n_points() {
            let mut request = Request::default();
            let Some(part) = to.part(position) else {
                prop_assert!(request.add_joined(&to.joined, position).is_err());
                continue;
            };
            request.add_joined(&to.joined, position).unwrap();
            let expected = bytes(&part);
            prop_assert_eq!(&filled(&index, &request, expected.len()), &expected);
            prop_assert_eq!(&filled(&listed, &request, expected.len()), &expected);
        }
    }
}

#[test]
fn what_cannot_be_joined_is_refused() {
    let mesh = Arc::new(Mesh::new(vec![("dp".into(), 4), ("tp".into(), 2)], None).unwrap());
    let flat = |axes: Option<Vec<usize>>, n: u64| {
        let partition = Partition {
            dims: vec![DimPartition::default()],
            uneven: Uneven::Refuse,
            flat: axes,
            stored: None,
        };
        Arc::new(Layout::new(Arc::clone(&mesh), vec![n], partition, &[]).unwrap())
    };
    let joined = |layouts: Vec<Arc<Layout>>, align| {
        let keys = (0..).map(|i: u32| i.to_string()).zip(layouts).collect();
        Joined::new(NAME.to_owned(), keys, align)
    };
    let one = flat(Some(vec![0]), 5);
    for (made, what) in [
        (joined(vec![], 1), "it has no keys"),
        (
            joined(vec![flat(None, 5)], 1),
            "the layouts of its keys have no `flat`",
        ),
        (
            joined(vec![Arc::clone(&one)], 0),
            "`align` is 0; expected at least 1",
        ),
        (
            joined(vec![Arc::clone(&one), flat(Some(vec![1]), 5)], 1),
            "`1` is partitioned over other axes",
        ),
    ] {
        let message = made.unwrap_err().to_string();
        assert!(
            message.contains(&format!("joined array `{NAME}`: {what}")),
            "{message}"
        );
    }
    let long = joined(
        vec![flat(Some(vec![0]), 1 << 61), flat(Some(vec![0]), 1 << 61)],
        1,
    );
    assert!(
        long.unwrap()
            .part(0)
            .unwrap_err()
            .to_string()
            .contains("it is too long")
    );
    assert!(joined(vec![one], 1 << 61).unwrap().part(0).is_err());
}
