//! The meaning of the values of a pickle: real files against what was put into them, and pickles made by hand.

#![expect(clippy::too_many_lines, reason = "a table of cases")]

use reshard_core::Kind;
use reshard_formats::dcp::folder;
use reshard_formats::objects::{Object, Objects, read_file, read_range};
use reshard_formats::pickle::{Id, Pickle};
use reshard_formats::torch_file::{Leaf, TorchFile};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data/torch")
        .join(name)
}

fn hex<'a>(bytes: impl Iterator<Item = &'a u8>) -> String {
    let mut text = String::new();
    for byte in bytes {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

/// A value as `expected.json` spells it.
fn spelled(objects: &Objects<'_>, id: Id) -> Value {
    let all = |ids: &[Id]| -> Value { ids.iter().map(|id| spelled(objects, *id)).collect() };
    match objects.get(id) {
        Object::None => Value::Null,
        Object::Bool(value) => json!(value),
        Object::Int(value) => json!(value),
        Object::Long(bytes) => {
            json!({"__long__": hex(bytes.iter().rev())})
        }
        Object::Float(value) if value.is_finite() => json!(value),
        Object::Float(value) => json!({"__float__": value.to_string().to_lowercase()}),
        Object::Complex(real, imaginary) => json!({"__complex__": [real, imaginary]}),
        Object::Text(text) => json!(text),
        Object::Bytes(bytes) => {
            json!({"__bytes__": hex(bytes.iter())})
        }
        Object::Tuple(items) | Object::List(items) => all(items),
        Object::Set(items) | Object::FrozenSet(items) => json!({"__set__": all(items)}),
        Object::Dict(items) => items
            .iter()
            .map(|[key, value]| json!([spelled(objects, *key), spelled(objects, *value)]))
            .collect(),
        Object::Scalar(elements) => json!({"__scalar__": elements.dtype, "n": elements.data.len()}),
        Object::Array {
            elements, shape, ..
        } => json!({"__array__": elements.dtype, "shape": shape}),
        Object::Tensor(name) => json!({"__tensor__": name}),
        Object::Opaque { name, .. } => json!({"__opaque__": name}),
    }
}

#[test]
fn values_of_real_files_are_those_of_their_ground_truth() {
    let folder = data("pt_files");
    let truth = std::fs::read(folder.join("expected.json")).unwrap();
    let truth: BTreeMap<String, Value> = serde_json::from_slice(&truth).unwrap();
    // What the ground truth spells in other words: values of torch, numbers beyond 64 bits, values of numpy.
    let other = BTreeMap::from([
        (
            "objects.pt::big",
            json!({"__long__": "0100000000000000000001"}),
        ),
        ("objects.pt::dtype", json!({"__opaque__": "torch.bfloat16"})),
        ("objects.pt::size", json!({"__opaque__": "torch.Size"})),
        ("training.pt::shape", json!({"__opaque__": "torch.Size"})),
        ("training.pt::device", json!({"__opaque__": "torch.device"})),
        ("training.pt::np_int", json!({"__scalar__": "i8", "n": 8})),
        ("training.pt::best", json!({"__scalar__": "f8", "n": 8})),
    ]);
    let mut n = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let file_name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if file_name.starts_with("expected") {
            continue;
        }
        let (file, leaves) = read_file(&path, false).unwrap();
        let objects = Objects::new(file.pickle());
        for (name, leaf) in leaves {
            let Leaf::Other(id) = leaf else { continue };
            let name = format!("{file_name}::{name}");
            let found = spelled(&objects, id);
            let same = name.replace("training_legacy.bin", "training.pt");
            if same == "training.pt::np_array" {
                assert_eq!(found["__array__"], json!("f4"), "{name}");
            } else if same == "objects.pt::empty_dict" {
                assert_eq!(found, json!([]), "{name}");
            } else {
                let expected = other.get(&*same).or_else(|| truth.get(&name));
                assert_eq!(Some(&found), expected, "{name}");
            }
            n += 1;
        }
    }
    assert!(n > 60, "{n}");
}

#[test]
fn of_tensors_that_are_left_out_the_function_remains() {
    let (file, leaves) = read_file(&data("pt_files/training.pt"), false).unwrap();
    let n_tensors = leaves
        .iter()
        .filter(|(_, leaf)| matches!(leaf, Leaf::Tensor(_)))
        .count();
    let objects = Objects::without_tensors(&file);
    let (mut found, mut pending) = (0, vec![file.pickle().root()]);
    while let Some(id) = pending.pop() {
        match objects.get(id) {
            Object::Tensor(name) => {
                assert!(name.starts_with("torch._utils._rebuild_"), "{name}");
                found += 1;
            }
            Object::Tuple(items) | Object::List(items) => pending.extend(items),
            Object::Dict(items) => pending.extend(items.iter().map(|[_, value]| value)),
            _ => {}
        }
    }
    assert!(n_tensors > 0);
    assert_eq!(found, n_tensors);
}

/// The meaning of the object of a pickle of protocol 2 that is made by these opcodes.
fn meaning(opcodes: &[&[u8]]) -> Value {
    let bytes = [&[&b"\x80\x02"[..]], opcodes, &[&b"."[..]]]
        .concat()
        .concat();
    let pickle = Pickle::decode(&bytes).unwrap();
    spelled(&Objects::new(&pickle), pickle.root())
}

#[test]
fn calls_that_plain_python_or_numpy_has_a_type_for() {
    const DTYPE: &[u8] = b"cnumpy\ndtype\n(X\x02\0\0\0f4\x89\x88tR(K\x03X\x01\0\0\0<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb";
    const BIG_ENDIAN: &[u8] = b"cnumpy\ndtype\n(X\x02\0\0\0f4\x89\x88tR(K\x03X\x01\0\0\0>NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb";
    const SCALAR: &[u8] = b"cnumpy._core.multiarray\nscalar\n(";
    const ARRAY: &[u8] =
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85X\x01\0\0\0btR(K\x01";
    let opaque = |name: &str| json!({"__opaque__": name});
    let encoded = |text: &[u8]| {
        let len = [text.len() as u8, 0, 0, 0];
        [
            b"c_codecs\nencode\n(X",
            &len[..],
            text,
            b"X\x06\0\0\0latin1tR",
        ]
        .concat()
    };
    let scalar = |dtype: &[u8], n: usize| [SCALAR, dtype, &encoded(&vec![b'a'; n]), b"tR"].concat();
    let array = |shape: &[u8], n: usize| {
        [
            ARRAY,
            shape,
            DTYPE,
            b"\x89",
            &encoded(&vec![b'a'; n]),
            b"tb",
        ]
        .concat()
    };
    let (scalar_name, array_name) = (
        opaque("numpy._core.multiarray.scalar"),
        opaque("numpy.core.multiarray._reconstruct"),
    );
    let cases: Vec<(&str, Vec<u8>, Value)> = vec![
        (
            "bytes of protocol 2",
            encoded("é".as_bytes()),
            json!({"__bytes__": "e9"}),
        ),
        (
            "text beyond bytes",
            encoded("€".as_bytes()),
            opaque("_codecs.encode"),
        ),
        (
            "no bytes",
            b"c__builtin__\nbytes\n)R".to_vec(),
            json!({"__bytes__": ""}),
        ),
        (
            "a set",
            b"c__builtin__\nset\n(]K\x01atR".to_vec(),
            json!({"__set__": [1]}),
        ),
        (
            "a frozenset",
            b"cbuiltins\nfrozenset\n(]K\x02atR".to_vec(),
            json!({"__set__": [2]}),
        ),
        (
            "a set of no list",
            b"cbuiltins\nset\n(K\x01tR".to_vec(),
            opaque("builtins.set"),
        ),
        (
            "a complex of integers",
            b"cbuiltins\ncomplex\n(K\x01K\x02tR".to_vec(),
            opaque("builtins.complex"),
        ),
        (
            "a number",
            scalar(DTYPE, 4),
            json!({"__scalar__": "f4", "n": 4}),
        ),
        ("half a number", scalar(DTYPE, 2), scalar_name.clone()),
        (
            "a number of no bytes",
            scalar(DTYPE, 0),
            scalar_name.clone(),
        ),
        ("a number in big endian", scalar(BIG_ENDIAN, 4), scalar_name),
        (
            "an array",
            array(b"K\x02K\x03\x86", 24),
            json!({"__array__": "f4", "shape": [2, 3]}),
        ),
        (
            "an empty array",
            array(b"K\0K\x03\x86", 0),
            json!({"__array__": "f4", "shape": [0, 3]}),
        ),
        (
            "an array without dims",
            array(b")", 4),
            json!({"__array__": "f4", "shape": []}),
        ),
        (
            "an array that is too short",
            array(b"K\x02K\x03\x86", 20),
            array_name.clone(),
        ),
        (
            "a negative extent",
            array(b"J\xff\xff\xff\xff\x85", 4),
            array_name.clone(),
        ),
        ("no shape", array(b"N", 4), array_name.clone()),
        (
            "extents that overflow",
            array(b"K\0J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x87", 0),
            array_name,
        ),
        (
            "a function",
            b"cargparse\nNamespace\n".to_vec(),
            opaque("argparse.Namespace"),
        ),
        (
            "a call",
            b"cargparse\nNamespace\n)R".to_vec(),
            opaque("argparse.Namespace"),
        ),
    ];
    for (case, opcodes, expected) in cases {
        assert_eq!(meaning(&[&opcodes]), expected, "{case}");
    }
}

#[test]
fn a_key_of_too_many_parts_is_refused() {
    let check = |n: usize| {
        let items = [&b"("[..], &b"K\x01".repeat(n), b"t"].concat();
        // Two times the same tuple: its parts count again.
        let bytes = [b"\x80\x02", &items[..], b"q\0h\0\x86."].concat();
        let pickle = Pickle::decode(&bytes).unwrap();
        Objects::new(&pickle).check_key(pickle.root())
    };
    check(10).unwrap();
    let error = check(60).unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported);
    assert!(error.message().contains("too many"), "{error}");
}

#[test]
fn a_folder_is_opened_with_its_objects() {
    for (name, is_packed) in [("dcp_plain", false), ("dcp_zstd", true)] {
        let (folder, metadata) = metadata_in(&data(name).join("checkpoint"));
        let opened = folder::open(&folder, &metadata, reshard_core::source::Method::Auto).unwrap();
        assert!(!opened.index.is_empty(), "{name}");
        for (file, end) in &opened.files {
            let n_bytes = std::fs::metadata(folder.join(file)).unwrap().len();
            assert!(*end <= n_bytes, "{name}: {file}");
        }
        let mut n = 0;
        for object in &opened.objects {
            let path = folder.join(&object.file);
            let range = (object.start, object.n_bytes);
            let file: TorchFile = read_range(&path, range, &object.transforms).unwrap();
            let objects = Objects::new(file.pickle());
            assert!(
                !spelled(&objects, file.pickle().root())
                    .to_string()
                    .is_empty()
            );
            assert_eq!(
                !object.transforms.is_empty(),
                is_packed,
                "{name}: {}",
                object.name
            );
            let unknown = ["stream.other".to_owned()];
            let error = read_range(&path, range, &unknown).unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported);
            assert!(error.message().contains("transformed"), "{error}");
            n += 1;
        }
        assert!(n > 0, "{name}");
        let error = folder::open(&folder, b"no pickle", reshard_core::source::Method::Auto);
        assert!(error.unwrap_err().message().contains(".metadata"));
    }
}

/// Files of Megatron-Core hold several parts of a tensor.
#[test]
fn each_part_is_found_in_its_file() {
    let (v012, v016) = ("iter_0000004", "iter_0000120");
    for (name, folder, is_grid) in [
        ("mcore_v016_tp2", v016, true),
        ("mcore_v012_flattened", v012, false),
    ] {
        let (folder, metadata) = metadata_in(&data(name).join("checkpoint").join(folder));
        let opened = folder::open(&folder, &metadata, reshard_core::source::Method::Auto).unwrap();
        assert_eq!(opened.index.check().unwrap(), [], "{name}");
        let key = "decoder.layers.mlp.linear_fc1.weight";
        let stored = opened.index.stored_arrays(key).unwrap();
        let mut files: Vec<u32> = stored.iter().map(|(tensor, _)| tensor.file).collect();
        files.sort_unstable();
        files.dedup();
        assert!(!is_grid || files.len() < stored.len(), "{name}: {files:?}");
    }
}

#[test]
fn the_descriptions_of_ranks_are_joined() {
    let folder = data("dcp_no_collectives/checkpoint");
    let mut descriptions = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".metadata") {
            descriptions.push((name, std::fs::read(path).unwrap()));
        }
    }
    descriptions.sort();
    assert_eq!(descriptions.len(), 2);
    let method = reshard_core::source::Method::Auto;
    let opened = folder::open_ranks(&folder, &descriptions, method).unwrap();
    opened.index.check_coverage().unwrap();
    let first = folder::open_ranks(&folder, &descriptions[..1], method).unwrap();
    assert!(
        first.index.check_coverage().is_err(),
        "the other half is missing"
    );
}

/// The folder of the first `.metadata` in a folder, and its content.
fn metadata_in(folder: &Path) -> (PathBuf, Vec<u8>) {
    let mut pending = vec![folder.to_owned()];
    while let Some(folder) = pending.pop() {
        if let Ok(metadata) = std::fs::read(folder.join(".metadata")) {
            return (folder, metadata);
        }
        let entries = std::fs::read_dir(&folder).unwrap();
        pending.extend(
            entries
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.is_dir()),
        );
    }
    panic!("no .metadata in {}", folder.display());
}
