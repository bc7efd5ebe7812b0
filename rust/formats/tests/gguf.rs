//! The header of GGUF files: an independent encoder, hostile files, and mutated ones.

#![expect(clippy::too_many_lines, reason = "a table of cases")]

use reshard_core::error::Kind;
use reshard_core::source::{Ranges, Source};
use reshard_core::{Error, Result};
use reshard_formats::gguf::{Gguf, Value, read};
use std::path::PathBuf;

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

fn source(bytes: Vec<u8>) -> Source {
    let n_bytes = bytes.len() as u64;
    Source::of_ranges(PathBuf::from("m.gguf"), n_bytes, Box::new(InMemory(bytes)))
}

fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

fn value(key: &str, kind: u32, bytes: &[u8]) -> Vec<u8> {
    [&text(key.as_bytes()), &kind.to_le_bytes()[..], bytes].concat()
}

fn array(of: u32, n: u64, bytes: &[u8]) -> Vec<u8> {
    [&of.to_le_bytes()[..], &n.to_le_bytes(), bytes].concat()
}

fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = text(name.as_bytes());
    bytes.extend((dims.len() as u32).to_le_bytes());
    for dim in dims {
        bytes.extend(dim.to_le_bytes());
    }
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

fn head(version: u32, n_tensors: u64, n_values: u64) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(n_tensors.to_le_bytes());
    bytes.extend(n_values.to_le_bytes());
    bytes
}

/// A file with values, tensors and so many bytes of data.
fn file(values: &[Vec<u8>], tensors: &[Vec<u8>], n_bytes: usize) -> Vec<u8> {
    let mut bytes = head(3, tensors.len() as u64, values.len() as u64);
    for one in values.iter().chain(tensors) {
        bytes.extend(one);
    }
    bytes.resize(bytes.len().next_multiple_of(32) + n_bytes, 7);
    bytes
}

fn sample() -> Vec<u8> {
    let values = [
        value("general.architecture", 8, &text(b"llama")),
        value("general.alignment", 4, &32_u32.to_le_bytes()),
        value("a.u8", 0, &[200]),
        value("a.i8", 1, &[200]),
        value("a.u16", 2, &[255, 255]),
        value("a.i16", 3, &[255, 255]),
        value("a.i32", 5, &(-7_i32).to_le_bytes()),
        value("a.f32", 6, &1.5_f32.to_le_bytes()),
        value("a.bool", 7, &[1]),
        value("a.u64", 10, &u64::MAX.to_le_bytes()),
        value("a.i64", 11, &i64::MIN.to_le_bytes()),
        value("a.f64", 12, &0.25_f64.to_le_bytes()),
        value(
            "tokens",
            9,
            &array(8, 2, &[text(b"\xff"), text(b"")].concat()),
        ),
        value("scores", 9, &array(6, 3, &[0; 12])),
        value("long", 8, &text("x".repeat(70_000).as_bytes())),
    ];
    let tensors = [
        tensor("f32", &[5, 3], 0, 0),
        tensor("q4_k", &[512, 2], 12, 64),
        tensor("empty", &[0, 2], 1, 640),
        tensor("scalar", &[], 30, 640),
    ];
    file(&values, &tensors, 642)
}

#[test]
fn values_and_tensors_are_read() {
    let found = read(&source(sample())).unwrap();
    let expected = [
        ("general.architecture", Value::Text("llama".into())),
        ("a.u8", Value::Int(200)),
        ("a.i8", Value::Int(-56)),
        ("a.u16", Value::Int(65535)),
        ("a.i16", Value::Int(-1)),
        ("a.i32", Value::Int(-7)),
        ("a.f32", Value::Float(1.5)),
        ("a.bool", Value::Bool(true)),
        ("a.u64", Value::Int(u64::MAX.into())),
        ("a.i64", Value::Int(i64::MIN.into())),
        ("a.f64", Value::Float(0.25)),
        ("tokens", Value::Skipped),
        ("scores", Value::Skipped),
        ("long", Value::Skipped),
    ];
    for (key, value) in expected {
        assert_eq!(found.values[key], value, "{key}");
    }
    let data = found.tensors[0].start;
    assert_eq!(data, sample().len() as u64 - 642);
    let stored: Vec<_> = found
        .tensors
        .iter()
        .map(|one| {
            (
                one.name.as_str(),
                one.of.name,
                one.stored().1,
                one.start - data,
            )
        })
        .collect();
    let expected = [
        ("f32", "F32", vec![3, 5], 0),
        ("q4_k", "Q4_K", vec![2, 288], 64),
        ("empty", "F16", vec![2, 0], 640),
        ("scalar", "BF16", vec![], 640),
    ];
    assert_eq!(stored, expected);
}

/// Another alignment than the default one.
#[test]
fn an_alignment_moves_the_data() {
    let values = [value("general.alignment", 4, &256_u32.to_le_bytes())];
    let mut bytes = file(&values, &[tensor("w", &[4], 0, 256)], 0);
    bytes.resize(256 + 256 + 16, 0);
    assert_eq!(read(&source(bytes)).unwrap().tensors[0].start, 512);
}

fn hostile() -> Vec<(&'static str, Vec<u8>, Kind)> {
    let (damaged, unsupported) = (Kind::Damaged, Kind::Unsupported);
    let one = |tensor: Vec<u8>| file(&[], &[tensor], 64);
    let of = |value: Vec<u8>| file(&[value], &[], 64);
    let big = (u64::MAX - 3).to_le_bytes();
    let cut = |n: usize| sample()[..n].to_vec();
    let name = |name: &[u8]| {
        let rest = tensor("", &[4], 0, 0);
        one([&text(name), &rest[8..]].concat())
    };
    vec![
        ("the file does not begin", Vec::new(), damaged),
        ("the file does not begin", b"GGU".to_vec(), damaged),
        (
            "the file does not begin",
            b"GGML\x03\0\0\0".to_vec(),
            damaged,
        ),
        ("the file ends inside", b"GGUF".to_vec(), damaged),
        (
            "the file ends inside",
            head(3, 0, 0)[..23].to_vec(),
            damaged,
        ),
        ("version 1", head(1, 0, 0), unsupported),
        ("version 4", head(4, 0, 0), unsupported),
        ("big-endian", head(3_u32.swap_bytes(), 0, 0), unsupported),
        ("at most 1000000", head(3, u64::MAX, 0), damaged),
        ("at most 1000000", head(3, 1_000_001, 0), damaged),
        ("and 65536 are", head(3, 0, u64::MAX), damaged),
        ("and 65536 are", head(3, 0, 65_537), damaged),
        ("the file ends inside", head(3, 1, 0), damaged),
        ("the file ends inside", head(3, 0, 1), damaged),
        ("the file ends inside", head(3, 1_000_000, 65_536), damaged),
        ("its key has 0 bytes", of(value("", 4, &[0; 4])), damaged),
        (
            "its key has 65536",
            of(value(&"k".repeat(65_536), 4, &[0; 4])),
            damaged,
        ),
        (
            "its key has 1844674",
            [head(3, 0, 1), big.to_vec()].concat(),
            damaged,
        ),
        (
            "its key is not UTF-8",
            of([&text(b"\xff\xfe"), &[0; 12][..]].concat()),
            damaged,
        ),
        ("the type 13", of(value("k", 13, &[0; 8])), damaged),
        (
            "the type 4294967295",
            of(value("k", u32::MAX, &[0; 8])),
            damaged,
        ),
        ("it is no truth value: 2", of(value("k", 7, &[2])), damaged),
        ("the text has 1844674", of(value("k", 8, &big)), damaged),
        (
            "the text is not UTF-8",
            of(value("k", 8, &text(b"\xc3"))),
            damaged,
        ),
        (
            "texts are longer",
            of(value("k", 9, &array(8, u64::MAX, &[]))),
            damaged,
        ),
        (
            "a text has 1844674",
            of(value(
                "k",
                9,
                &array(8, 2, &[text(b"a"), big.to_vec()].concat()),
            )),
            damaged,
        ),
        (
            "the array has 1844674",
            of(value("k", 9, &array(12, u64::MAX, &[]))),
            damaged,
        ),
        (
            "the array has 1844674",
            of(value("k", 9, &array(10, 1 << 61, &[]))),
            damaged,
        ),
        (
            "the array has 400 bytes",
            of(value("k", 9, &array(4, 100, &[]))),
            damaged,
        ),
        (
            "the type 99",
            of(value("k", 9, &array(99, 1, &[0; 8]))),
            damaged,
        ),
        (
            "an array of arrays",
            of(value("k", 9, &array(9, 1, &array(4, 1, &[0; 4])))),
            unsupported,
        ),
        (
            "`k` occurs twice",
            file(&[value("k", 0, &[1]), value("k", 0, &[1])], &[], 0),
            damaged,
        ),
        (
            "no power of two",
            of(value("general.alignment", 4, &0_u32.to_le_bytes())),
            damaged,
        ),
        (
            "no power of two",
            of(value("general.alignment", 4, &24_u32.to_le_bytes())),
            damaged,
        ),
        (
            "no power of two",
            of(value("general.alignment", 5, &(-32_i32).to_le_bytes())),
            damaged,
        ),
        (
            "no power of two",
            of(value("general.alignment", 6, &32_f32.to_le_bytes())),
            damaged,
        ),
        ("its name has 0 bytes", name(b""), damaged),
        ("its name has 1025 bytes", name(&[b'w'; 1025]), damaged),
        ("control character", name(b"w\n"), damaged),
        ("control character", name(b"w\0"), damaged),
        ("its name is not UTF-8", name(b"w\xff"), damaged),
        ("it has 5 dims", one(tensor("w", &[1; 5], 0, 0)), damaged),
        ("the type 4,", one(tensor("w", &[4], 4, 0)), unsupported),
        (
            "the type 1000,",
            one(tensor("w", &[4], 1000, 0)),
            unsupported,
        ),
        ("no blocks of 32", one(tensor("w", &[48], 8, 0)), damaged),
        (
            "no blocks of 256",
            one(tensor("w", &[32, 8], 12, 0)),
            damaged,
        ),
        ("no blocks of 32", one(tensor("w", &[], 2, 0)), damaged),
        (
            "overflows",
            one(tensor("w", &[1 << 32, 1 << 32], 0, 0)),
            damaged,
        ),
        (
            "overflows",
            one(tensor("w", &[u64::MAX - 31, 2, 2], 8, 0)),
            damaged,
        ),
        (
            "overflows",
            one(tensor("w", &[0, u64::MAX, u64::MAX], 0, 0)),
            damaged,
        ),
        (
            "`w` (F32 (17,)) reaches beyond",
            one(tensor("w", &[17], 0, 0)),
            damaged,
        ),
        ("reaches beyond", one(tensor("w", &[16], 0, 32)), damaged),
        (
            "reaches beyond",
            one(tensor("w", &[4], 0, u64::MAX - 31)),
            damaged,
        ),
        ("no multiple of 32", one(tensor("w", &[4], 0, 4)), damaged),
        (
            "`w` is stored twice",
            file(
                &[],
                &[tensor("w", &[4], 0, 0), tensor("w", &[4], 0, 32)],
                64,
            ),
            damaged,
        ),
        (
            "`a` and `b` overlap",
            file(
                &[],
                &[tensor("a", &[16], 0, 0), tensor("b", &[4], 0, 32)],
                64,
            ),
            damaged,
        ),
        (
            "overlap",
            file(
                &[],
                &[tensor("a", &[4], 0, 32), tensor("b", &[4], 0, 32)],
                64,
            ),
            damaged,
        ),
        ("the file ends inside", cut(40), damaged),
        ("reaches beyond", cut(sample().len() - 1), damaged),
    ]
}

#[test]
fn hostile_files_are_refused_with_what_is_wrong() {
    let cases = hostile();
    assert!(cases.len() >= 40, "{}", cases.len());
    for (number, (message, bytes, kind)) in cases.into_iter().enumerate() {
        let error = read(&source(bytes)).map(|_| ()).unwrap_err();
        let found = error.to_string();
        assert!(found.contains(message), "{number}: {message}: {found}");
        assert_eq!(error.kind(), kind, "{number}: {found}");
    }
}

/// Numbers from a seed (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

fn mutated(samples: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    const WORDS: [&[u8]; 8] = [
        b"GGUF",
        &[0xff; 8],
        &[0; 8],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
        &[9, 0, 0, 0],
        &[8, 0, 0, 0],
        &[1, 0, 0, 0, 0, 0, 0, 0],
        &[12, 0, 0, 0],
    ];
    let mut bytes = samples[random.below(samples.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        match random.below(6) {
            _ if bytes.is_empty() => {}
            0 => bytes[at] = random.below(256) as u8,
            1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes.truncate(at),
            3 => {
                let word = WORDS[random.below(WORDS.len())];
                let end = (at + word.len()).min(bytes.len());
                bytes.splice(at..end, word.iter().copied());
            }
            4 => {
                let end = (at + random.below(40)).min(bytes.len());
                bytes.drain(at..end);
            }
            _ => {
                let end = (at + random.below(40)).min(bytes.len());
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
        }
    }
    bytes
}

/// What is read lies in the file, and no two tensors share a byte.
fn check(found: &Gguf, n_bytes: u64) {
    let mut ranges: Vec<_> = found
        .tensors
        .iter()
        .map(|one| {
            let (dtype, shape) = one.stored();
            let size = dtype.n_bytes(&shape).unwrap();
            assert!(one.start + size <= n_bytes);
            (one.start, one.start + size)
        })
        .filter(|(start, end)| start < end)
        .collect();
    ranges.sort_unstable();
    assert!(ranges.is_sorted_by(|a, b| a.1 <= b.0));
}

fn fuzz(runs: u64) -> u64 {
    let small = [
        file(
            &[value("general.architecture", 8, &text(b"llama"))],
            &[tensor("w", &[4, 2], 0, 0)],
            64,
        ),
        file(
            &[value(
                "tokens",
                9,
                &array(8, 2, &[text(b"a"), text(b"bc")].concat()),
            )],
            &[tensor("a", &[256], 12, 0), tensor("b", &[32, 2], 8, 160)],
            256,
        ),
        file(
            &[value("general.alignment", 4, &64_u32.to_le_bytes())],
            &[tensor("a", &[2], 1, 0)],
            128,
        ),
    ];
    let samples: Vec<_> = small
        .into_iter()
        .chain(
            hostile()
                .into_iter()
                .map(|(_, bytes, _)| bytes)
                .filter(|bytes| bytes.len() < 4096),
        )
        .collect();
    let mut n_read = 0;
    for run in 0..runs {
        let bytes = mutated(&samples, &mut Random(run));
        let n_bytes = bytes.len() as u64;
        if let Ok(found) = read(&source(bytes)) {
            check(&found, n_bytes);
            n_read += 1;
        }
    }
    n_read
}

#[test]
fn mutated_files_are_refused_or_read_within_their_bytes() {
    assert!(fuzz(20_000) > 100);
}

/// `cargo test --release -p reshard-formats --test gguf -- --ignored`: 1.2 million files.
#[test]
#[ignore = "takes a minute"]
fn a_million_mutated_files() {
    assert!(fuzz(1_200_000) > 100);
}
