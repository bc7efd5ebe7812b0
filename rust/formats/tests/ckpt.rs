//! The parser of `.ckpt` files: real files, an independent encoder, damaged files, and a file larger than memory.

#![expect(clippy::too_many_lines, reason = "a table of cases")]

use proptest::collection::vec;
use proptest::prelude::*;
use reshard_core::control::Control;
use reshard_core::error::Kind;
use reshard_core::index::Index;
use reshard_core::listed::Listed;
use reshard_core::local_array::LocalArray;
use reshard_core::region::row_major_strides;
use reshard_core::shard_file::ShardFile;
use reshard_core::source::{Method, Ranges, Source};
use reshard_formats::ckpt;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

fn read(bytes: &[u8]) -> reshard_core::Result<Listed> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    ckpt::read(&Source::open(file.path(), true, Method::Read).unwrap())
}

fn samples() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/mindspore/ckpt");
    let mut found: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "ckpt"))
        .collect();
    found.sort();
    assert!(found.len() >= 5);
    found
}

// -- an independent encoder, after the documentation of the protobuf wire format

fn varint(mut n: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while n >= 0x80 {
        bytes.push(n as u8 | 0x80);
        n >>= 7;
    }
    bytes.push(n as u8);
    bytes
}

fn field(number: u8, content: &[u8]) -> Vec<u8> {
    [
        &[number << 3 | 2],
        &varint(content.len() as u64)[..],
        content,
    ]
    .concat()
}

/// The encoding of a value: that of `MindSpore`, or another one that the wire format allows.
#[derive(Debug, Clone, Copy)]
struct Style {
    packed: bool,
    reversed: bool,
}

const PLAIN: Style = Style {
    packed: false,
    reversed: false,
};

fn value(tag: &str, type_name: &str, dims: &[u64], content: &[u8], style: Style) -> Vec<u8> {
    let all_dims = if style.packed && !dims.is_empty() {
        let packed: Vec<u8> = dims.iter().flat_map(|dim| varint(*dim)).collect();
        field(1, &packed)
    } else {
        dims.iter()
            .flat_map(|dim| [vec![0x08], varint(*dim)].concat())
            .collect()
    };
    let mut fields = [all_dims, field(2, type_name.as_bytes()), field(3, content)];
    if style.reversed {
        fields.reverse();
    }
    let tensor = fields.concat();
    let mut fields = [field(1, tag.as_bytes()), field(2, &tensor)];
    if style.reversed {
        fields.reverse();
    }
    field(1, &fields.concat())
}

// -- what is accepted

/// A tensor and the lengths in bytes of its records.
#[derive(Debug, Clone)]
struct Tensor {
    tag: String,
    kind: usize,
    dims: Vec<u64>,
    records: Vec<usize>,
    style: Style,
}

const TYPES: &[(&str, &str, u64)] = &[
    ("Int8", "I8", 1),
    ("UInt8", "U8", 1),
    ("Int16", "I16", 2),
    ("UInt16", "U16", 2),
    ("Int32", "I32", 4),
    ("UInt32", "U32", 4),
    ("Int64", "I64", 8),
    ("UInt64", "U64", 8),
    ("Float16", "F16", 2),
    ("Float32", "F32", 4),
    ("Float64", "F64", 8),
    ("BFloat16", "BF16", 2),
    ("Bool", "BOOL", 1),
];

fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let style =
        (any::<bool>(), any::<bool>()).prop_map(|(packed, reversed)| Style { packed, reversed });
    let tensor = (
        "[a-z.]{1,6}",
        0..TYPES.len(),
        vec(1_u64..6, 0..4),
        vec(0_usize..40, 0..4),
        style,
    );
    vec(tensor, 1..6).prop_map(|all| {
        all.into_iter()
            .enumerate()
            .map(|(i, (tag, kind, dims, cuts, style))| {
                let (_, _, unit) = TYPES[kind];
                let n = dims.iter().product::<u64>() as usize;
                let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at % (n + 1)).collect();
                cuts.sort_unstable();
                cuts.insert(0, 0);
                cuts.push(n);
                let records = cuts
                    .windows(2)
                    .map(|pair| (pair[1] - pair[0]) * unit as usize);
                Tensor {
                    tag: format!("{tag}{i}"),
                    kind,
                    dims,
                    records: records.collect(),
                    style,
                }
            })
            .collect()
    })
}

/// Encodes tensors. Returns the file, and the content of each tensor.
fn encode(tensors: &[Tensor]) -> (Vec<u8>, Vec<Vec<u8>>) {
    let (mut file, mut contents) = (Vec::new(), Vec::new());
    let mut next = 0_u8;
    for tensor in tensors {
        let n: usize = tensor.records.iter().sum();
        let content: Vec<u8> = (0..n)
            .map(|_| {
                next = next.wrapping_mul(31).wrapping_add(7);
                next
            })
            .collect();
        let mut at = 0;
        for len in &tensor.records {
            let (name, ..) = TYPES[tensor.kind];
            let part = &content[at..at + len];
            file.extend(value(&tensor.tag, name, &tensor.dims, part, tensor.style));
            at += len;
        }
        contents.push(content);
    }
    (file, contents)
}

/// Assembles a tensor from the tiles of its parts, element by element.
fn assembled(file: &[u8], records: &Listed, array: &LocalArray) -> Vec<u8> {
    let unit = (array.dtype.bits() / 8) as usize;
    let n: u64 = array.shape.iter().product();
    let strides = row_major_strides(&array.shape);
    let mut bytes = vec![None; n as usize];
    for part in &array.parts {
        let entry = records.entry(records.find(&part.name).unwrap());
        assert_eq!(entry.shape, part.shape);
        for tile in &part.tiles {
            let extents = tile.global.shape();
            for i in 0..tile.global.n_elements() {
                let mut rest = i;
                let mut at: Vec<u64> = tile.global.offset().to_vec();
                for d in (0..extents.len()).rev() {
                    at[d] += rest % extents[d];
                    rest /= extents[d];
                }
                let to: u64 = at.iter().zip(&strides).map(|(a, s)| a * s).sum();
                let from = entry.start as usize + tile.local_at(&at) as usize * unit;
                assert!(from + unit <= entry.end as usize);
                let slot = &mut bytes[to as usize];
                assert!(slot.is_none(), "an element is covered twice");
                *slot = Some(file[from..from + unit].to_vec());
            }
        }
    }
    bytes.into_iter().flat_map(Option::unwrap).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reads_what_was_written(tensors in tensors()) {
        let (file, contents) = encode(&tensors);
        let records = read(&file).unwrap();
        let arrays = records.arrays();
        prop_assert_eq!(arrays.len(), tensors.len());
        for ((array, tensor), content) in arrays.iter().zip(&tensors).zip(&contents) {
            prop_assert_eq!(&array.name, &tensor.tag);
            prop_assert_eq!(array.dtype.name(), TYPES[tensor.kind].1);
            prop_assert_eq!(&array.shape, &tensor.dims);
            prop_assert_eq!(array.parts.len(), tensor.records.len());
            prop_assert_eq!(&assembled(&file, &records, array), content);
            let split = records.split(&tensor.tag);
            prop_assert_eq!(split.as_ref(), (array.parts.len() > 1).then_some(array));
        }
        prop_assert!(records.split("none").is_none());
    }

    /// A changed file gives an error of the right kind, or a table whose ranges are inside the file.
    #[test]
    fn damage_is_an_error_or_harmless(
        tensors in tensors(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>(), 0_u8..4), 1..4),
        with_crc in any::<bool>(),
    ) {
        let (mut file, _) = encode(&tensors);
        if with_crc {
            file.extend(b"crc_num\0\0\0\0\0\0\x01\x02\x03\x04");
        }
        for (at, byte, kind) in changes {
            let at = at.index(file.len());
            match kind {
                0 => file[at] = byte,
                1 => file.insert(at, byte),
                2 => drop(file.remove(at)),
                _ => file.truncate(at + 1),
            }
            if file.is_empty() {
                file.push(byte);
            }
        }
        check_any(&file)?;
    }

    #[test]
    fn noise_is_an_error_or_harmless(noise in vec(any::<u8>(), 0..200)) {
        check_any(&noise)?;
        check_any(&[&[0x0a][..], &varint(noise.len() as u64)[..], &noise[..]].concat())?;
    }
}

fn check_any(file: &[u8]) -> Result<(), TestCaseError> {
    match read(file) {
        Err(error) => {
            prop_assert!(
                matches!(error.kind(), Kind::Damaged | Kind::Unsupported),
                "{error}"
            );
            prop_assert!(!error.message().chars().any(char::is_control), "{error}");
        }
        Ok(records) => {
            let mut end = 0;
            for i in 0..records.len() {
                let entry = records.entry(i);
                prop_assert!(end <= entry.start && entry.start <= entry.end);
                prop_assert_eq!(
                    entry.dtype.n_bytes(&entry.shape),
                    Some(entry.end - entry.start)
                );
                prop_assert_eq!(records.find(entry.name), Some(i));
                end = entry.end;
            }
            prop_assert!(end <= file.len() as u64);
            for array in records.arrays() {
                assembled(file, &records, &array);
            }
        }
    }
    Ok(())
}

#[test]
fn every_truncation_of_a_real_file_is_detected() {
    for path in samples() {
        let bytes = fs::read(&path).unwrap();
        let whole = read(&bytes).unwrap();
        // A truncation between two values gives a valid file without a CRC.
        let mut between = 0;
        for n in 0..bytes.len() {
            match read(&bytes[..n]) {
                Ok(cut) => {
                    between += 1;
                    assert!(cut.len() <= whole.len() && !cut.has_crc());
                }
                Err(error) => assert_eq!(error.kind(), Kind::Damaged, "{n}: {error}"),
            }
        }
        assert!(
            between <= whole.arrays().len() + whole.texts().len(),
            "{path:?}"
        );
    }
}

// -- what is rejected

#[test]
fn rejects_with_a_message() {
    let good = value("w", "Float32", &[2], &[0; 8], PLAIN);
    let v = |tag, kind, dims: &[u64], n| value(tag, kind, dims, &vec![0; n], PLAIN);
    let of = |content: &[u8]| field(1, content);
    let tensor = |content: &[u8]| field(1, &[field(1, b"w"), field(2, content)].concat());
    let ten = |byte| [&[byte; 9][..], &[0x01]].concat();
    let cases: Vec<(&str, Vec<u8>, Kind, &str)> = vec![
        ("nothing", vec![], Kind::Damaged, "the file is empty"),
        ("zeros", vec![0; 64], Kind::Damaged, "begins with 0x00"),
        (
            "a strategy",
            vec![8, 1, 26, 2],
            Kind::Damaged,
            "begins with 0x08",
        ),
        (
            "a header",
            b"\x10\0\0\0\0\0\0\0{\"w\":".to_vec(),
            Kind::Damaged,
            "begins with 0x10",
        ),
        (
            "a CRC alone",
            b"crc_num\0\0\0\0\0\0\0\0\0\0".to_vec(),
            Kind::Damaged,
            "holds no value",
        ),
        (
            "a CRC of 80 bits",
            [&good[..], b"crc_num\x01\0\0\0\0\0\0\0\0\0"].concat(),
            Kind::Damaged,
            "more than 32 bits",
        ),
        (
            "half a CRC",
            [&good[..], b"crc_num\0\0"].concat(),
            Kind::Damaged,
            "begins with 0x63",
        ),
        (
            "something behind",
            [&good[..], b"\0"].concat(),
            Kind::Damaged,
            "begins with 0x00",
        ),
        (
            "a length beyond the file",
            vec![0x0a, 100, 0x0a],
            Kind::Damaged,
            "has the length 100, but only 1 bytes are left",
        ),
        (
            "a length of 2^63",
            [&[0x0a][..], &varint(1 << 63)].concat(),
            Kind::Damaged,
            "but only 0 bytes are left",
        ),
        (
            "an endless length",
            [&[0x0a][..], &[0xff; 12]].concat(),
            Kind::Damaged,
            "is too large",
        ),
        (
            "a length cut short",
            vec![0x0a, 0x80],
            Kind::Damaged,
            "ends too early",
        ),
        ("an empty value", of(b""), Kind::Damaged, "no tag"),
        (
            "no tensor",
            of(&field(1, b"w")),
            Kind::Damaged,
            "holds no tensor",
        ),
        (
            "a hash table",
            of(&[field(1, b"t"), field(3, b"")].concat()),
            Kind::Unsupported,
            "`t`: it is a hash table",
        ),
        (
            "an unknown field",
            of(&[field(1, b"w"), field(9, b"")].concat()),
            Kind::Damaged,
            "is not the tag of a field of a value",
        ),
        (
            "two tags",
            of(&[field(1, b"w"), field(1, b"v")].concat()),
            Kind::Damaged,
            "occurs twice",
        ),
        (
            "an empty tag",
            v("", "Float32", &[2], 8),
            Kind::Damaged,
            "is empty",
        ),
        (
            "a tag of control characters",
            v("a\u{1b}[2J", "Float32", &[2], 8),
            Kind::Damaged,
            "control character",
        ),
        (
            "a tag that is no text",
            of(&[&field(1, b"\xff\xfe")[..], b""].concat()),
            Kind::Damaged,
            "not UTF-8",
        ),
        (
            "a long tag",
            v(&"n".repeat(1025), "Float32", &[2], 8),
            Kind::Unsupported,
            "at most 1024",
        ),
        (
            "no type",
            tensor(&field(3, &[0; 4])),
            Kind::Damaged,
            "no type",
        ),
        (
            "no content",
            tensor(&field(2, b"Float32")),
            Kind::Damaged,
            "no content",
        ),
        (
            "an unknown field of the tensor",
            tensor(&field(7, b"")),
            Kind::Damaged,
            "is not the tag of a field of a tensor",
        ),
        (
            "two types",
            tensor(&[field(2, b"Int8"), field(2, b"Int8")].concat()),
            Kind::Damaged,
            "occurs twice",
        ),
        (
            "Int4",
            v("w", "Int4", &[2], 1),
            Kind::Unsupported,
            "`w`: its type is `Int4`",
        ),
        (
            "an invented type",
            v("w", "Float\x07", &[2], 8),
            Kind::Unsupported,
            "`Float\\u{7}`",
        ),
        (
            "a type in small letters",
            v("w", "float32", &[2], 8),
            Kind::Unsupported,
            "`float32`",
        ),
        (
            "a long type",
            v("w", &"F".repeat(65), &[2], 8),
            Kind::Damaged,
            "65 bytes",
        ),
        (
            "content too short",
            v("w", "Float32", &[2], 4),
            Kind::Damaged,
            "needs 8 bytes, found 4",
        ),
        (
            "content too long",
            v("w", "Float32", &[2], 12),
            Kind::Damaged,
            "needs 8 bytes, found 12",
        ),
        (
            "half an element",
            v("w", "Float32", &[2], 7),
            Kind::Damaged,
            "needs 8 bytes, found 7",
        ),
        (
            "a scalar of two",
            v("w", "Float32", &[0], 8),
            Kind::Damaged,
            "needs 4 bytes, found 8",
        ),
        (
            "a negative extent",
            tensor(&[&[8][..], &ten(0xff), &field(2, b"Int8"), &field(3, b"")].concat()),
            Kind::Damaged,
            "-1 is negative",
        ),
        (
            "extents that overflow",
            v("w", "Float32", &[1 << 40, 1 << 40], 8),
            Kind::Damaged,
            "overflows",
        ),
        (
            "overflow beside a zero",
            v("w", "Float32", &[0, 1 << 40, 1 << 40], 0),
            Kind::Damaged,
            "overflows",
        ),
        (
            "33 dims",
            v("w", "Float32", &[1; 33], 4),
            Kind::Damaged,
            "more than 32 dims",
        ),
        (
            "packed dims beyond",
            tensor(&[0x0a, 9, 1]),
            Kind::Damaged,
            "its dims field has the length 9",
        ),
        (
            "one tag apart",
            [&good[..], &v("v", "Int8", &[1], 1), &good].concat(),
            Kind::Damaged,
            "`w` occurs twice",
        ),
        (
            "text and tensor of one tag",
            [&good[..], &v("w", "str", &[0], 8)].concat(),
            Kind::Damaged,
            "its records differ",
        ),
        (
            "text twice",
            [v("s", "str", &[0], 8), v("s", "str", &[0], 8)].concat(),
            Kind::Damaged,
            "`s` occurs twice",
        ),
        (
            "text of five bytes",
            v("s", "str", &[0], 5),
            Kind::Damaged,
            "is not a multiple of 4",
        ),
        (
            "records of two types",
            [v("w", "Int8", &[2], 1), v("w", "Bool", &[2], 1)].concat(),
            Kind::Damaged,
            "its records differ",
        ),
        (
            "records of two shapes",
            [v("w", "Int8", &[2], 1), v("w", "Int8", &[3], 1)].concat(),
            Kind::Damaged,
            "its records differ",
        ),
        (
            "too few records",
            [v("w", "Int8", &[4], 1), v("w", "Int8", &[4], 1)].concat(),
            Kind::Damaged,
            "needs 4 bytes, found 2",
        ),
        (
            "a value twice",
            [&good[..], &good].concat(),
            Kind::Damaged,
            "needs 8 bytes, found 16",
        ),
        (
            "a cut element",
            [v("w", "Float32", &[2], 3), v("w", "Float32", &[2], 5)].concat(),
            Kind::Unsupported,
            "inside an element",
        ),
        (
            "a tag like a record",
            [
                v("w", "Int8", &[2], 1),
                v("w", "Int8", &[2], 1),
                v("w#1", "Int8", &[1], 1),
            ]
            .concat(),
            Kind::Damaged,
            "`w#1` occurs twice",
        ),
    ];
    for (case, bytes, kind, message) in cases {
        let error = read(&bytes)
            .err()
            .unwrap_or_else(|| panic!("{case} is accepted"));
        assert_eq!(error.kind(), kind, "{case}: {error}");
        assert!(error.message().contains(message), "{case}: {error}");
    }
}

// -- a file larger than memory

#[test]
fn contents_are_not_read() {
    const CONTENT: u64 = 1 << 40;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("big.ckpt");
    let head = |tag: &str, rest: u64| {
        let dims = [vec![0x08], varint(2 * CONTENT)].concat();
        let before = [&dims[..], &field(2, b"UInt8"), &[0x1a], &varint(rest)].concat();
        let tensor = [&[0x12][..], &varint(before.len() as u64 + rest), &before].concat();
        let inner = [field(1, tag.as_bytes()), tensor].concat();
        [&[0x0a][..], &varint(inner.len() as u64 + rest), &inner].concat()
    };
    let file = File::create(&path).unwrap();
    // Two sparse records of a tebibyte each, then a small tensor.
    let mut at = 0;
    for _ in 0..2 {
        let head = head("big", CONTENT);
        file.write_all_at(&head, at).unwrap();
        at += head.len() as u64 + CONTENT;
    }
    let last = value("small", "Int32", &[1], &7_i32.to_le_bytes(), PLAIN);
    if file.write_all_at(&last, at).is_err() {
        return; // a file system that has no files of this size
    }
    for method in [Method::Read, Method::Map] {
        let mut index = Index::new();
        let file = index.add_local(path.clone(), true, method, ckpt::format());
        index.add_whole("big", file).unwrap();
        index.add_whole("small", file).unwrap();
        assert_eq!(index.shape("big").unwrap(), [2 * CONTENT]);
        assert_eq!(index.stored_arrays("big").unwrap().len(), 2);
        assert_eq!(index.check().unwrap(), []);
    }
}

// -- objects of a store

#[derive(Debug)]
struct Object {
    bytes: Vec<u8>,
    is_borrowable: bool,
}

impl Object {
    fn range(&self, start: u64, len: u64) -> &[u8] {
        &self.bytes[start as usize..(start + len) as usize]
    }
}

impl Ranges for Object {
    fn read_at(&self, start: u64, to: &mut [u8]) -> reshard_core::Result<()> {
        to.copy_from_slice(self.range(start, to.len() as u64));
        Ok(())
    }

    fn bytes(&self, start: u64, len: u64) -> reshard_core::Result<Option<&[u8]>> {
        Ok(self.is_borrowable.then(|| self.range(start, len)))
    }

    fn is_borrowable(&self) -> bool {
        self.is_borrowable
    }
}

#[test]
fn a_ckpt_file_over_ranges_has_the_table_and_the_crc_of_the_local_file() {
    let (mut n_files, mut n_with_crc) = (0, 0);
    for path in samples() {
        let local = Source::open(&path, false, Method::Auto).unwrap();
        let expected = ShardFile::open(local, &ckpt::format(), None).unwrap();
        for is_borrowable in [false, true] {
            let object = Object {
                bytes: fs::read(&path).unwrap(),
                is_borrowable,
            };
            let file = ShardFile::open(
                Source::of_ranges(path.clone(), object.bytes.len() as u64, Box::new(object)),
                &ckpt::format(),
                None,
            )
            .unwrap();
            assert_eq!(file.table().arrays(), expected.table().arrays());
            assert_eq!(file.has_crc(), expected.has_crc());
            file.verify(&Control::default()).unwrap();
        }
        n_files += 1;
        n_with_crc += usize::from(expected.has_crc());
    }
    assert!(
        n_files >= 5 && n_with_crc > 0,
        "{n_files} files, {n_with_crc} with a CRC"
    );
}
