//! The header of a shard file: accepted headers, rejected headers with their errors, and agreement with the reference
//! implementation.

#![expect(
    clippy::too_many_lines,
    clippy::type_complexity,
    reason = "tables of cases"
)]

use proptest::collection::vec;
use proptest::prelude::*;
use reshard_core::dtype::Dtype;
use reshard_core::error::Kind;
use reshard_core::header::{self, Header};
use reshard_core::source::{Method, Source};
use safetensors::SafeTensors;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A file with the text of a header and `data_bytes` zeros.
fn file_of(json: &[u8], data_bytes: usize) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json);
    file.resize(file.len() + data_bytes, 0);
    file
}

fn read(bytes: &[u8]) -> reshard_core::Result<Header> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shard.safetensors");
    fs::write(&path, bytes).unwrap();
    Header::read(&open(&path))
}

fn open(path: &Path) -> Source {
    Source::open(path, true, Method::Read).unwrap()
}

/// name, dtype, shape, start, end
type Row = (String, String, Vec<u64>, u64, u64);

fn rows(header: &Header) -> Vec<Row> {
    (0..header.len())
        .map(|i| header.entry(i))
        .map(|e| {
            (
                e.name.to_owned(),
                e.dtype.name().to_owned(),
                e.shape,
                e.start,
                e.end,
            )
        })
        .collect()
}

/// The same by the reference implementation. Its order of tensors without bytes can differ.
fn reference_rows(file: &[u8]) -> Result<Vec<Row>, safetensors::SafeTensorError> {
    let (_, metadata) = SafeTensors::read_metadata(file)?;
    let mut rows: Vec<Row> = metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let shape = info.shape.iter().map(|&extent| extent as u64).collect();
            let (start, end) = info.data_offsets;
            (
                name,
                info.dtype.to_string(),
                shape,
                start as u64,
                end as u64,
            )
        })
        .collect();
    rows.sort();
    Ok(rows)
}

fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    rows.sort();
    rows
}

#[test]
fn reads_a_header() {
    let json = br#"{"__metadata__":{"format":"pt","a":"\u0041\n"},
        "b":{"shape":[],"dtype":"I64","data_offsets":[8,16]},
        "empty":{"dtype":"F32","shape":[0,7],"data_offsets":[8,8]},
        "a\/\u00e9\ud83d\ude00":{"dtype":"BF16","shape":[2, 2],"data_offsets":[0,8]}}   "#;
    let header = read(&file_of(json, 16)).unwrap();
    let found: Vec<_> = rows(&header)
        .into_iter()
        .map(|(name, dtype, shape, start, end)| (name, dtype, shape, start..end))
        .collect();
    let expected = [
        ("a/é😀".to_owned(), "BF16".to_owned(), vec![2, 2], 0..8),
        ("empty".to_owned(), "F32".to_owned(), vec![0, 7], 8..8),
        ("b".to_owned(), "I64".to_owned(), vec![], 8..16),
    ];
    assert_eq!(found, expected);
    assert_eq!(
        header.metadata().unwrap().collect::<Vec<_>>(),
        [("a", "A\n"), ("format", "pt")]
    );
    assert_eq!(header.data_start(), 8 + json.len() as u64);
    let numbers = ["a/é😀", "empty", "b", "c", ""].map(|name| header.find(name));
    assert_eq!(numbers, [Some(0), Some(1), Some(2), None, None]);
    assert_eq!(
        rows(&header).len(),
        reference_rows(&file_of(json, 16)).unwrap().len()
    );
}

#[test]
fn no_tensor_and_no_metadata() {
    let header = read(&file_of(b"{}", 0)).unwrap();
    assert!(header.is_empty() && header.metadata().is_none());
}

#[test]
fn every_dtype_has_its_size() {
    for &dtype in Dtype::ALL {
        let (elements, bytes) = dtype.unit();
        let entry = |shape: u64, end| {
            format!(r#"{{"w":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[0,{end}]}}}}"#)
        };
        let whole = entry(elements * 3, bytes * 3);
        let header = Header::parse(whole.clone().into_bytes(), bytes * 3).unwrap();
        assert_eq!(header.entry(0).dtype, dtype);
        assert!(
            Header::parse(
                entry(elements * 3, bytes * 3 + 1).into_bytes(),
                bytes * 3 + 1
            )
            .is_err()
        );
        assert_eq!(
            reference_rows(&file_of(whole.as_bytes(), bytes as usize * 3)).unwrap(),
            rows(&header)
        );
    }
}

/// A header of one tensor `w`: F32, 2 elements, 8 bytes.
const W: &str = r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;

#[test]
fn rejects_invalid_headers() {
    use Kind::{Damaged, Unsupported};
    const NONE: Option<&str> = None;
    const KEY: Option<&str> = Some("w");
    let entry = |entry: &str| format!(r#"{{"w":{entry}}}"#);
    let fields = |dtype: &str, shape: &str, offsets: &str| {
        entry(&format!(
            r#"{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}"#
        ))
    };
    let named = |name: &str| W.replacen('w', name, 1);
    let f32s = |list: &[(&str, u64, u64)]| {
        let tensors = list.iter().map(|(name, start, end)| {
            let n = (end - start) / 4;
            format!(r#""{name}":{{"dtype":"F32","shape":[{n}],"data_offsets":[{start},{end}]}}"#)
        });
        format!("{{{}}}", tensors.collect::<Vec<_>>().join(","))
    };
    let metadata = |metadata: &str| W.replacen('{', &format!(r#"{{"__metadata__":{metadata},"#), 1);
    let long = "n".repeat(1025);
    let escaped_long = r"\u006e".repeat(1025);
    #[rustfmt::skip]
    let cases: Vec<(&str, String, u64, Kind, Option<&str>, &str)> = vec![
        // The object.
        ("nothing", String::new(), 0, Damaged, NONE, "must start with `{`, found nothing"),
        ("only spaces", "  ".into(), 0, Damaged, NONE, "must start with `{`, found ` `"),
        ("leading space", format!(" {W}"), 8, Damaged, NONE, "must start with `{`"),
        ("byte order mark", format!("\u{feff}{W}"), 8, Damaged, NONE, "must start with `{`, found `\\u{feff}`"),
        ("a list", "[]".into(), 0, Damaged, NONE, "must start with `{`, found `[`"),
        ("no end", W[..W.len() - 1].into(), 8, Damaged, NONE, "expected `,` or `}` at byte 53 of the header, found its end"),
        ("only a brace", "{".into(), 0, Damaged, NONE, "expected a string at byte 1"),
        ("NUL padding", format!("{W}\0\0"), 8, Damaged, NONE, "only spaces after the header's object"),
        ("newline padding", format!("{W} \n"), 8, Damaged, NONE, "only spaces after the header's object at byte 55"),
        ("second object", format!("{W}{W}"), 8, Damaged, NONE, "only spaces after"),
        ("trailing comma", "{\"__metadata__\":{},}".into(), 0, Damaged, NONE, "expected a string at byte 19 of the header, found `}`"),
        ("leading comma", "{,}".into(), 0, Damaged, NONE, "expected a string at byte 1"),
        ("no comma", f32s(&[("a", 0, 4), ("b", 4, 8)]).replace("},\"b", "}\"b"), 8, Damaged, NONE, "expected `,` or `}`"),
        ("no colon", W.replace("w\":", "w\""), 8, Damaged, NONE, "expected `:`"),
        ("name without quotes", "{w:{}}".into(), 0, Damaged, NONE, "expected a string"),
        ("name in single quotes", W.replace("\"w\"", "'w'"), 8, Damaged, NONE, "expected a string"),
        ("number as name", W.replace("\"w\"", "1"), 8, Damaged, NONE, "expected a string"),
        ("comment", W.replace("{\"w", "{/**/\"w"), 8, Damaged, NONE, "expected a string"),
        ("vertical tab as white space", W.replace("w\":", "w\":\u{b}"), 8, Damaged, KEY, "expected `{`"),
        // Names.
        ("empty name", named(""), 8, Damaged, Some(""), "empty"),
        ("name of 1025 bytes", named(&long), 8, Unsupported, NONE, "the name of a tensor has more than 1024 bytes"),
        ("name of 1025 escaped bytes", named(&escaped_long), 8, Unsupported, NONE, "the name of a tensor has more than 1024 bytes"),
        ("escaped NUL in a name", named(r"w\u0000"), 8, Damaged, Some("w\0"), "control character"),
        ("escape sequence in a name", named(r"\u001b[2J"), 8, Damaged, Some("\u{1b}[2J"), "control character"),
        ("C1 control in a name", named("\u{9b}"), 8, Damaged, Some("\u{9b}"), "control character"),
        ("newline in a name", named("w\n"), 8, Damaged, NONE, "without control characters"),
        ("name without an end", "{\"w".into(), 0, Damaged, NONE, "has no end"),
        ("name that ends in a backslash", "{\"w\\".into(), 0, Damaged, NONE, "has no end"),
        ("unknown escape", named(r"\x41"), 8, Damaged, NONE, "invalid escape `\\x41`"),
        ("short escape", named(r"\u004"), 8, Damaged, NONE, "invalid escape"),
        ("escape with a sign", named(r"\u+041"), 8, Damaged, NONE, "invalid escape"),
        ("high surrogate alone", named(r"\ud83d"), 8, Damaged, NONE, "invalid escape"),
        ("low surrogate alone", named(r"\ude00"), 8, Damaged, NONE, "invalid escape"),
        ("two high surrogates", named(r"\ud83d\ud83d"), 8, Damaged, NONE, "invalid escape"),
        ("name twice", f32s(&[("w", 0, 4), ("w", 4, 8)]), 8, Damaged, KEY, "occurs twice in the header"),
        ("name and entry twice", f32s(&[("w", 0, 4), ("w", 0, 4)]), 4, Damaged, KEY, "occurs twice in the header"),
        ("name in two spellings", f32s(&[("w", 0, 4), (r"\u0077", 4, 8)]), 8, Damaged, KEY, "occurs twice in the header"),
        ("name twice, far apart", f32s(&[("w", 0, 4), ("a", 4, 8), ("z", 8, 12), ("w", 12, 16)]), 16, Damaged, KEY, "occurs twice"),
        // Entries.
        ("entry null", entry("null"), 0, Damaged, KEY, "expected `{`"),
        ("entry list", entry("[]"), 0, Damaged, KEY, "expected `{`"),
        ("entry text", entry(r#""F32""#), 0, Damaged, KEY, "expected `{`"),
        ("entry empty", entry("{}"), 0, Damaged, KEY, "field `dtype` is missing"),
        ("no dtype", entry(r#"{"shape":[2],"data_offsets":[0,8]}"#), 8, Damaged, KEY, "field `dtype` is missing"),
        ("no shape", entry(r#"{"dtype":"F32","data_offsets":[0,8]}"#), 8, Damaged, KEY, "field `shape` is missing"),
        ("no offsets", entry(r#"{"dtype":"F32","shape":[2]}"#), 8, Damaged, KEY, "field `data_offsets` is missing"),
        ("unknown field", W.replace("}}", r#","strides":[1]}}"#), 8, Damaged, KEY, "unknown field `strides`; expected dtype, shape and data_offsets"),
        ("field in capitals", W.replace("shape", "Shape"), 8, Damaged, KEY, "unknown field `Shape`"),
        ("long unknown field", W.replace("shape", &long), 8, Unsupported, KEY, "the name of a field has more than 1024 bytes"),
        ("dtype twice", W.replace("}}", r#","dtype":"F32"}}"#), 8, Damaged, KEY, "field `dtype` occurs twice"),
        ("shape twice", W.replace("}}", r#","shape":[2]}}"#), 8, Damaged, KEY, "field `shape` occurs twice"),
        ("offsets twice", W.replace("}}", r#","data_offsets":[0,8]}}"#), 8, Damaged, KEY, "field `data_offsets` occurs twice"),
        ("field in two spellings", W.replace("}}", r#","\u0073hape":[2]}}"#), 8, Damaged, KEY, "field `shape` occurs twice"),
        // dtype.
        ("unknown dtype", fields(r#""F128""#, "[2]", "[0,32]"), 32, Unsupported, KEY, "tensor `w`: unknown dtype `F128`"),
        ("dtype in small letters", fields(r#""f32""#, "[2]", "[0,8]"), 8, Unsupported, KEY, "unknown dtype `f32`"),
        ("empty dtype", fields(r#""""#, "[2]", "[0,8]"), 8, Unsupported, KEY, "unknown dtype ``"),
        ("dtype a number", fields("32", "[2]", "[0,8]"), 8, Damaged, KEY, "expected a string"),
        ("dtype null", fields("null", "[2]", "[0,8]"), 8, Damaged, KEY, "expected a string"),
        // shape.
        ("shape a number", fields(r#""F32""#, "2", "[0,8]"), 8, Damaged, KEY, "expected `[`"),
        ("shape null", fields(r#""F32""#, "null", "[0,8]"), 8, Damaged, KEY, "expected `[`"),
        ("shape without an end", fields(r#""F32""#, "[2", "[0,8]"), 8, Damaged, KEY, "expected a plain integer"),
        ("extent missing", fields(r#""F32""#, "[2,]", "[0,8]"), 8, Damaged, KEY, "expected a plain integer"),
        ("extent negative", fields(r#""F32""#, "[-2]", "[0,8]"), 8, Damaged, KEY, "expected a plain integer from 0 to 2^63 - 1 at byte 29 of the header, found `-2]"),
        ("extent minus zero", fields(r#""F32""#, "[-0]", "[0,0]"), 0, Damaged, KEY, "expected a plain integer"),
        ("extent with a plus", fields(r#""F32""#, "[+2]", "[0,8]"), 8, Damaged, KEY, "expected a plain integer"),
        ("extent with a fraction", fields(r#""F32""#, "[2.0]", "[0,8]"), 8, Damaged, KEY, "expected a plain integer"),
        ("extent with an exponent", fields(r#""F32""#, "[2e0]", "[0,8]"), 8, Damaged, KEY, "expected a plain integer"),
        ("extent with a zero before it", fields(r#""F32""#, "[02]", "[0,8]"), 8, Damaged, KEY, "expected a plain integer"),
        ("extent in hexadecimal", fields(r#""F32""#, "[0x2]", "[0,8]"), 8, Damaged, KEY, "expected `,` or `]`"),
        ("extent as text", fields(r#""F32""#, "[\"2\"]", "[0,8]"), 8, Damaged, KEY, "expected a plain integer"),
        ("extent true", fields(r#""F32""#, "[true]", "[0,4]"), 4, Damaged, KEY, "expected a plain integer"),
        ("extent null", fields(r#""F32""#, "[null]", "[0,4]"), 4, Damaged, KEY, "expected a plain integer"),
        ("extent NaN", fields(r#""F32""#, "[NaN]", "[0,4]"), 4, Damaged, KEY, "expected a plain integer"),
        ("extent a list", fields(r#""F32""#, "[[2]]", "[0,8]"), 8, Damaged, KEY, "expected a plain integer"),
        ("extent of 2^63 beside a zero", fields(r#""U8""#, "[0,9223372036854775808]", "[0,0]"), 0, Damaged, KEY, "expected a plain integer"),
        ("extent of 2^64 - 1 beside a zero", fields(r#""U8""#, "[0,18446744073709551615]", "[0,0]"), 0, Damaged, KEY, "expected a plain integer"),
        ("extent of 2^64", fields(r#""U8""#, "[18446744073709551616]", "[0,0]"), 0, Damaged, KEY, "expected a plain integer"),
        ("extent of many digits", fields(r#""U8""#, &format!("[{}]", "9".repeat(10_000)), "[0,0]"), 0, Damaged, KEY, "expected a plain integer"),
        ("33 dims", fields(r#""U8""#, &format!("[1{}]", ",1".repeat(32)), "[0,1]"), 1, Damaged, KEY, "the shape has more than 32 dims"),
        ("deep nesting", fields(r#""U8""#, &"[".repeat(1_000_000), "[0,1]"), 1, Damaged, KEY, "expected a plain integer"),
        ("deep nesting of objects", r#"{"w":"#.repeat(200_000), 1, Damaged, KEY, "unknown field `w`"),
        ("product of 2^64", fields(r#""U8""#, "[4294967296,4294967296]", "[0,0]"), 0, Damaged, KEY, "the size of U8 of shape [4294967296, 4294967296] overflows"),
        ("product of 2^64 beside a zero", fields(r#""U8""#, "[4294967296,4294967296,0]", "[0,0]"), 0, Damaged, KEY, "overflows"),
        ("bits of 2^64", fields(r#""F64""#, "[288230376151711744]", "[0,0]"), 0, Damaged, KEY, "overflows"),
        // data_offsets.
        ("offsets a number", fields(r#""F32""#, "[2]", "8"), 8, Damaged, KEY, "expected `[`"),
        ("no offset", fields(r#""F32""#, "[0]", "[]"), 0, Damaged, KEY, "expected a plain integer"),
        ("one offset", fields(r#""F32""#, "[2]", "[8]"), 8, Damaged, KEY, "expected `,`"),
        ("three offsets", fields(r#""F32""#, "[2]", "[0,8,8]"), 8, Damaged, KEY, "expected `]`"),
        ("offset negative", fields(r#""F32""#, "[2]", "[-8,0]"), 8, Damaged, KEY, "expected a plain integer"),
        ("offset with an exponent", fields(r#""F32""#, "[2]", "[0,8e0]"), 8, Damaged, KEY, "expected a plain integer"),
        ("offsets reversed", fields(r#""F32""#, "[2]", "[8,0]"), 8, Damaged, KEY, "the end of data_offsets [8, 0] is before the start"),
        ("offset of 2^63", fields(r#""F32""#, "[2]", "[0,9223372036854775808]"), 8, Damaged, KEY, "expected a plain integer"),
        ("too few bytes", fields(r#""F32""#, "[2]", "[0,4]"), 4, Damaged, KEY, "F32 of shape [2] needs 8 bytes, but data_offsets [0, 4] have 4"),
        ("too many bytes", fields(r#""F32""#, "[2]", "[0,12]"), 12, Damaged, KEY, "F32 of shape [2] needs 8 bytes, but data_offsets [0, 12] have 12"),
        ("bytes of an empty tensor", fields(r#""F32""#, "[0,3]", "[0,12]"), 12, Damaged, KEY, "F32 of shape [0, 3] needs 0 bytes"),
        ("no bytes of a scalar", fields(r#""F32""#, "[]", "[0,0]"), 0, Damaged, KEY, "F32 of shape [] needs 4 bytes"),
        ("half a byte", fields(r#""F4""#, "[3]", "[0,2]"), 2, Damaged, KEY, "F4 of shape [3] has 12 bits, which is not an integer number of bytes"),
        ("six bits", fields(r#""F6_E2M3""#, "[1]", "[0,1]"), 1, Damaged, KEY, "F6_E2M3 of shape [1] has 6 bits, which is not an integer number of bytes"),
        // Coverage.
        ("truncated file", W.into(), 7, Damaged, KEY, "its data ends at byte 8, but the file has only 7 bytes of data"),
        ("file without data", W.into(), 0, Damaged, KEY, "its data ends at byte 8, but the file has only 0 bytes"),
        ("hole before", f32s(&[("w", 4, 12)]), 12, Damaged, KEY, "bytes 0 to 4 of the data, before tensor `w`, belong to no tensor"),
        ("hole between", f32s(&[("a", 0, 4), ("w", 8, 12)]), 12, Damaged, KEY, "bytes 4 to 8 of the data, before tensor `w`"),
        ("hole of one byte", f32s(&[("w", 5, 9), ("a", 0, 4)]), 9, Damaged, KEY, "bytes 4 to 5 of the data"),
        ("bytes after", W.into(), 9, Damaged, NONE, "the tensors end at byte 8 of the data, but the file has 9 bytes of data"),
        ("data without tensors", "{}".into(), 1, Damaged, NONE, "the tensors end at byte 0 of the data, but the file has 1 bytes"),
        ("overlap", f32s(&[("a", 0, 8), ("w", 4, 12)]), 12, Damaged, KEY, "tensor `w` starts at byte 4 of the data, inside tensor `a`"),
        ("same bytes twice", f32s(&[("a", 0, 8), ("w", 0, 8)]), 8, Damaged, KEY, "tensor `w` starts at byte 0 of the data, inside tensor `a`"),
        ("overlap of one byte", f32s(&[("w", 3, 7), ("a", 0, 4)]), 7, Damaged, KEY, "inside tensor `a`"),
        ("one inside another", f32s(&[("a", 0, 16), ("w", 4, 8)]), 16, Damaged, KEY, "inside tensor `a`"),
        ("empty inside another", f32s(&[("a", 0, 16), ("w", 8, 8)]), 16, Damaged, KEY, "inside tensor `a`"),
        ("empty behind the data", f32s(&[("a", 0, 4), ("w", 8, 8)]), 4, Damaged, KEY, "its data ends at byte 8"),
        ("empty after a hole", f32s(&[("a", 0, 4), ("w", 8, 8)]), 8, Damaged, KEY, "bytes 4 to 8 of the data, before tensor `w`"),
        // Metadata.
        ("metadata null", metadata("null"), 8, Damaged, NONE, "expected `{`"),
        ("metadata a list", metadata("[]"), 8, Damaged, NONE, "expected `{`"),
        ("metadata value a number", metadata(r#"{"format":1}"#), 8, Damaged, NONE, "`__metadata__`: expected a string"),
        ("metadata value null", metadata(r#"{"format":null}"#), 8, Damaged, NONE, "`__metadata__`: expected a string"),
        ("metadata value an object", metadata(r#"{"format":{}}"#), 8, Damaged, NONE, "`__metadata__`: expected a string"),
        ("metadata key twice", metadata(r#"{"a":"1","b":"2","a":"3"}"#), 8, Damaged, NONE, "key `a` occurs twice in `__metadata__`"),
        ("metadata key in two spellings", metadata(r#"{"a":"1","\u0061":"3"}"#), 8, Damaged, NONE, "key `a` occurs twice in `__metadata__`"),
        ("metadata value with a bad escape", metadata(r#"{"a":"\q"}"#), 8, Damaged, NONE, "invalid escape `\\q`"),
        ("metadata value with a tab", metadata("{\"a\":\"\t\"}"), 8, Damaged, NONE, "without control characters"),
        ("metadata twice", r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0, Damaged, NONE, "`__metadata__` occurs twice"),
        ("metadata in two spellings", r#"{"__metadata__":{},"\u005f_metadata__":{}}"#.into(), 0, Damaged, NONE, "`__metadata__` occurs twice"),
        ("metadata that is a tensor", W.replace("\"w\"", "\"__metadata__\""), 8, Damaged, NONE, "`__metadata__`: expected a string"),
    ];
    assert!(cases.len() >= 100);
    for (name, json, data_bytes, kind, key, message) in cases {
        let error = Header::parse(json.into_bytes(), data_bytes).expect_err(name);
        assert!(error.message().contains(message), "{name}: {error}");
        assert_eq!(error.kind(), kind, "{name}: {error}");
        assert_eq!(error.facts().1, key, "{name}: {error}");
        assert!(
            !error
                .to_string()
                .contains(|c: char| c.is_control() && c != '\n'),
            "{name}: {error:?}"
        );
    }
}

#[test]
fn rejects_other_bytes() {
    let file = |length: u64, rest: &[u8]| [&length.to_le_bytes(), rest].concat();
    let text = |text: &[u8]| file_of(text, 0);
    #[rustfmt::skip]
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty file", vec![], "the file has 0 bytes"),
        ("seven bytes", vec![0; 7], "the file has 7 bytes"),
        ("zeros", vec![0; 4096], "must start with `{`, found nothing"),
        ("length only", file(2, b""), "is 2 bytes, but only 0 bytes follow"),
        ("length beyond the file", file(55, W.as_bytes()), "is 55 bytes, but only 54 bytes follow"),
        ("length inside the header", file(40, W.as_bytes()), "the string at byte 32 of the header has no end"),
        ("length of 100,000,001", file(100_000_001, W.as_bytes()), "is 100000001 bytes; at most 100000000"),
        ("length of 2^63", file(1 << 63, W.as_bytes()), "is 9223372036854775808 bytes; at most"),
        ("length of 2^64 - 8", file(u64::MAX - 7, W.as_bytes()), "is 18446744073709551608 bytes; at most"),
        ("length of 2^64 - 1", file(u64::MAX, W.as_bytes()), "is 18446744073709551615 bytes; at most"),
        ("length in big-endian", [&54_u64.to_be_bytes(), W.as_bytes()].concat(), "at most 100000000"),
        ("no UTF-8", text(b"{\"\xff\":"), "not UTF-8 from byte 2"),
        ("surrogate as UTF-8", text(b"{\"\xed\xa0\x80\":{"), "not UTF-8 from byte 2"),
        ("overlong UTF-8", text(b"{\"\xc0\x80\":{"), "not UTF-8 from byte 2"),
        ("character cut off at the end", text(b"{\"\xc3\xa9"), "has no end"),
        ("half a character at the end", file(3, b"{\"\xc3\xa9"), "not UTF-8 from byte 2"),
        ("UTF-16", text(b"\xff\xfe{\0}\0"), "not UTF-8 from byte 0"),
        ("a zip file", b"PK\x03\x04\x14\0\0\0\x08\0".to_vec(), "at most 100000000"),
        ("a pickle", b"\x80\x02}q\0(U\x01a".to_vec(), "at most 100000000"),
    ];
    for (name, bytes, message) in cases {
        let error = read(&bytes).expect_err(name);
        assert!(error.message().contains(message), "{name}: {error}");
        assert_eq!(error.kind(), Kind::Damaged, "{name}: {error}");
        let path = error.facts().0.expect(name);
        assert!(path.ends_with("/shard.safetensors"), "{name}: {path}");
        assert!(SafeTensors::read_metadata(&bytes).is_err(), "{name}");
    }
}

#[test]
fn every_truncation_is_rejected() {
    let file = file_of(W.as_bytes(), 8);
    assert!(read(&file).is_ok());
    for n_bytes in 0..file.len() {
        assert_eq!(
            read(&file[..n_bytes]).expect_err("shorter").kind(),
            Kind::Damaged,
            "{n_bytes} bytes"
        );
    }
    for n_more in 1..64 {
        let longer = [&file[..], &vec![b' '; n_more]].concat();
        assert_eq!(
            read(&longer).expect_err("longer").kind(),
            Kind::Damaged,
            "{n_more} bytes more"
        );
    }
}

#[test]
fn a_file_that_becomes_shorter_is_an_error() {
    let bytes = file_of(W.as_bytes(), 8);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    let source = open(file.path());
    file.as_file().set_len(20).unwrap();
    let error = Header::read(&source).unwrap_err();
    assert!(
        error
            .message()
            .contains("the file ends inside its header: it had 70 bytes when opened"),
        "{error}"
    );
}

#[test]
fn accepts_what_is_allowed() {
    #[rustfmt::skip]
    let cases: Vec<(&str, String, usize)> = vec![
        ("no tensors", "{}".into(), 0),
        ("empty metadata", r#"{"__metadata__":{}}"#.into(), 0),
        ("metadata last", W.replace("}}", r#"},"__metadata__":{"":""}}"#), 8),
        ("white space everywhere", "{\r\"w\" :\t{\n\"dtype\" : \"F32\" ,\r\"shape\" : [ 2 ]\t,\n\"data_offsets\" : [ 0 , 8 ] } } ".into(), 8),
        ("padded", format!("{W}{}", " ".repeat(4000)), 8),
        ("32 dims", format!(r#"{{"w":{{"dtype":"U8","shape":[1{}],"data_offsets":[0,1]}}}}"#, ",1".repeat(31)), 1),
        ("name of 1024 bytes", W.replace('w', &"w".repeat(1024)), 8),
        ("name of 1024 escaped bytes", W.replace('w', &r"\u0077".repeat(1024)), 8),
        ("name like a path", W.replace('w', "../a b\u{202e}"), 8),
        ("empty tensors at one place", r#"{"b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[2,0],"data_offsets":[0,0]},"c":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"d":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}"#.into(), 1),
        ("large extent beside a zero", r#"{"w":{"dtype":"U8","shape":[0,1152921504606846976],"data_offsets":[0,0]}}"#.into(), 0),
    ];
    for (name, json, data_bytes) in cases {
        let file = file_of(json.as_bytes(), data_bytes);
        let header = read(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(
            sorted(rows(&header)),
            reference_rows(&file).unwrap(),
            "{name}"
        );
    }
}

#[test]
fn real_files_read_as_by_the_reference() {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/mindspore")];
    let mut files: Vec<PathBuf> = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path
                .extension()
                .is_some_and(|suffix| suffix == "safetensors")
            {
                files.push(path);
            }
        }
    }
    assert!(files.len() > 50);
    for path in files {
        let bytes = fs::read(&path).unwrap();
        let header = Header::read(&open(&path)).unwrap();
        assert_eq!(
            sorted(rows(&header)),
            reference_rows(&bytes).unwrap(),
            "{}",
            path.display()
        );
    }
}

/// Both give the same result for a file that both accept; a file that the reference rejects is rejected here as well.
fn check_against_reference(file: &[u8]) -> Result<(), TestCaseError> {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let json = file[8..8 + length].to_vec();
    if let Ok(header) = Header::parse(json, (file.len() - 8 - length) as u64) {
        let reference = reference_rows(file);
        prop_assert!(
            reference.is_ok(),
            "the reference refuses it: {:?}",
            reference
        );
        prop_assert_eq!(sorted(rows(&header)), reference.unwrap());
        let (_, theirs) = SafeTensors::read_metadata(file).unwrap();
        let ours = header
            .metadata()
            .map(|pairs| pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect());
        prop_assert_eq!(ours.as_ref(), theirs.metadata().as_ref());
        for i in 0..header.len() {
            prop_assert_eq!(header.find(header.entry(i).name), Some(i));
        }
    }
    Ok(())
}

type Tensor = (String, Dtype, Vec<u64>);

/// A few tensors with distinct names; most have an integer number of bytes.
fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let dtype = proptest::sample::select(Dtype::ALL);
    let shape = vec(prop_oneof![1 => Just(0_u64), 6 => 1_u64..8], 0..5);
    let name = prop_oneof![
        "[a-z.]{1,8}",
        "[^\\p{Cc}]{1,12}",
        Just("it's \"\\/".to_owned())
    ];
    vec((name, dtype, shape), 0..8).prop_map(|mut tensors: Vec<Tensor>| {
        for (i, (name, dtype, shape)) in tensors.iter_mut().enumerate() {
            name.push_str(&i.to_string());
            if dtype.n_bytes(shape).is_none() {
                shape.push(4);
            }
        }
        tensors
    })
}

fn metadata() -> impl Strategy<Value = Vec<(String, String)>> {
    vec((".{0,6}", ".{0,20}"), 0..4).prop_map(|mut pairs: Vec<(String, String)>| {
        pairs.sort();
        pairs.dedup_by(|a, b| a.0 == b.0);
        pairs
    })
}

fn build(
    tensors: &[Tensor],
    metadata: &[(String, String)],
    align_bytes: u64,
) -> reshard_core::Result<(Vec<u8>, Vec<u64>)> {
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice()))
        .collect();
    header::build(&tensors, metadata, align_bytes)
}

/// One change of a text: position, number of removed bytes, inserted bytes.
fn mutation() -> impl Strategy<Value = (usize, usize, Vec<u8>)> {
    let token = proptest::sample::select(
        [
            "0",
            "1",
            "8",
            "-",
            ".",
            "e",
            "9223372036854775807",
            "18446744073709551616",
            "[",
            "]",
            "{",
            "}",
            ",",
            ":",
            "\"",
            "\\",
            " ",
            "\n",
            "\\u0061",
            "\\ud83d",
            "null",
            "\"shape\"",
            "\"dtype\"",
            "\"data_offsets\"",
            "\"__metadata__\":{},",
            "\"F32\"",
            "\"U8\"",
            "\"F4\"",
            "\0",
            "\u{80}",
            "[0,0]",
            "[]",
            "{}",
        ]
        .as_slice(),
    );
    let put = prop_oneof![3 => token.prop_map(|token| token.as_bytes().to_vec()), 1 => vec(any::<u8>(), 0..3)];
    (
        any::<usize>(),
        prop_oneof![4 => 0..3_usize, 1 => 0..40_usize],
        put,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_built_reads_back(tensors in tensors(), metadata in metadata(), align_bytes in proptest::sample::select(vec![1_u64, 8, 64, 4096])) {
        let (mut file, starts) = build(&tensors, &metadata, align_bytes).unwrap();
        prop_assert_eq!(file.len() as u64 % align_bytes, 0);
        let mut expected = Vec::new();
        let mut end = 0;
        for ((name, dtype, shape), &start) in tensors.iter().zip(&starts) {
            prop_assert_eq!(start, end);
            end = start + dtype.n_bytes(shape).unwrap();
            expected.push((name.clone(), dtype.name().to_owned(), shape.clone(), start, end));
        }
        let header_bytes = file.len();
        file.resize(header_bytes + end as usize, 0);
        let header = read(&file).unwrap();
        prop_assert_eq!(header.data_start(), header_bytes as u64);
        prop_assert_eq!(sorted(rows(&header)), sorted(expected.clone()));
        // The order of the data is the given order, except for tensors without bytes.
        prop_assert!(rows(&header).is_sorted_by_key(|row| (row.3, row.4)));
        prop_assert_eq!(header.metadata().is_some(), !metadata.is_empty());
        let pairs: Vec<_> = header.metadata().into_iter().flatten().collect();
        prop_assert_eq!(pairs, metadata.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect::<Vec<_>>());
        prop_assert_eq!(reference_rows(&file).unwrap(), sorted(expected));
        check_against_reference(&file)?;
    }

    #[test]
    fn a_changed_header_is_rejected_or_read_as_by_the_reference(
        tensors in tensors(), metadata in metadata(), mutations in vec(mutation(), 1..4),
    ) {
        let (header, starts) = build(&tensors, &metadata, 1).unwrap();
        let data_bytes = tensors.last().map_or(0, |(_, dtype, shape)| starts.last().unwrap() + dtype.n_bytes(shape).unwrap());
        let mut json = header[8..].to_vec();
        for (at, taken, put) in mutations {
            let at = at % (json.len() + 1);
            let end = (at + taken).min(json.len());
            json.splice(at..end, put);
        }
        check_against_reference(&file_of(&json, data_bytes as usize))?;
    }

    /// Well-formed headers with numbers and names that can be inconsistent.
    #[test]
    fn an_inconsistent_header_is_rejected_or_read_as_by_the_reference(
        entries in vec(("[ab]{1,2}", proptest::sample::select(vec!["F32", "U8", "F4", "F6_E2M3", "C64"]), vec(0_u64..3, 0..3), 0_u64..6, 0_u64..10), 0..4),
        data_bytes in 0_usize..16,
    ) {
        let tensors: Vec<_> = entries.into_iter().map(|(name, dtype, shape, start, n_bytes)| {
            let end = start + n_bytes;
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#)
        }).collect();
        check_against_reference(&file_of(format!("{{{}}}", tensors.join(",")).as_bytes(), data_bytes))?;
    }
}

#[test]
fn the_header_written_is_canonical() {
    let tensors = [
        ("b".to_owned(), Dtype::Bf16, vec![2, 3]),
        ("a\n\"é".replace('\n', ""), Dtype::U8, vec![]),
    ];
    let metadata = [
        ("z".to_owned(), "1".to_owned()),
        ("format".to_owned(), "pt\n".to_owned()),
    ];
    let (header, starts) = build(&tensors, &metadata, 64).unwrap();
    let expected = concat!(
        r#"{"__metadata__":{"format":"pt\n","z":"1"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"#,
        r#""a\"é":{"dtype":"U8","shape":[],"data_offsets":[12,13]}}"#,
    );
    assert_eq!(u64::from_le_bytes(header[..8].try_into().unwrap()), 184);
    assert_eq!(header.len(), 192);
    assert_eq!(
        std::str::from_utf8(&header[8..])
            .unwrap()
            .trim_end_matches(' '),
        expected
    );
    assert_eq!(starts, [0, 12]);
}

#[test]
fn rejects_what_a_header_cannot_hold() {
    use Kind::{Argument, Unsupported};
    let tensor = |name: &str, dtype, shape: &[u64]| (name.to_owned(), dtype, shape.to_vec());
    let w = || tensor("w", Dtype::F32, &[2]);
    let long = "n".repeat(1025);
    #[rustfmt::skip]
    let cases: Vec<(&str, Vec<Tensor>, Kind, Option<&str>, &str)> = vec![
        ("name twice", vec![w(), tensor("v", Dtype::U8, &[]), w()], Argument, Some("w"), "occurs twice"),
        ("no name", vec![tensor("", Dtype::U8, &[])], Argument, Some(""), "empty"),
        ("long name", vec![tensor(&long, Dtype::U8, &[])], Argument, Some(&long), "1025 bytes"),
        ("control character", vec![tensor("a\n", Dtype::U8, &[])], Argument, Some("a\n"), "control character"),
        ("metadata as a tensor", vec![tensor("__metadata__", Dtype::U8, &[])], Argument, Some("__metadata__"), "the name is reserved"),
        ("33 dims", vec![tensor("w", Dtype::U8, &[1; 33])], Unsupported, Some("w"), "33 dims; at most 32"),
        ("half a byte", vec![tensor("w", Dtype::F4, &[3])], Argument, Some("w"), "not an integer number of bytes"),
        ("overflow", vec![tensor("w", Dtype::F32, &[1 << 31, 1 << 31])], Argument, Some("w"), "overflows"),
        ("overflow of all", vec![tensor("v", Dtype::U8, &[1 << 60]); 9].into_iter().enumerate().map(|(i, (name, dtype, shape))| (format!("{name}{i}"), dtype, shape)).collect(), Argument, Some("v7"), "exceeds 2^63 - 1"),
        ("extent of 2^63", vec![tensor("w", Dtype::F4, &[0, 1 << 63])], Argument, Some("w"), "overflows"),
    ];
    for (name, tensors, kind, key, message) in cases {
        let error = build(&tensors, &[], 64).expect_err(name);
        assert!(error.message().contains(message), "{name}: {error}");
        assert_eq!(
            (error.kind(), error.facts().1),
            (kind, key),
            "{name}: {error}"
        );
    }
    let pair = |value: &str| ("key".to_owned(), value.to_owned());
    let error = build(&[w()], &[pair("1"), pair("2")], 64).unwrap_err();
    assert!(
        error.kind() == Argument && error.message().contains("metadata key `key` occurs twice"),
        "{error}"
    );
    let error = build(&[w()], &[pair(&"v".repeat(100_000_000))], 64).unwrap_err();
    assert!(
        error.kind() == Unsupported && error.message().contains("at most 100000000"),
        "{error}"
    );
    let error = build(&[w()], &[], 0).unwrap_err();
    assert!(
        error.kind() == Argument && error.message().contains("`align_bytes` is 0"),
        "{error}"
    );
}

#[test]
fn a_header_of_many_tensors_is_built_as_that_of_few() {
    let many: Vec<Tensor> = (0..12_000_u64)
        .map(|i| {
            (
                format!("layer \"{i}\" \\ \u{e9}"),
                Dtype::U8,
                vec![i % 3, 5],
            )
        })
        .collect();
    let (header, starts) = build(&many, &[], 8).unwrap();
    let header = std::str::from_utf8(&header[8..]).unwrap().trim_end();
    let (mut entries, mut at) = (Vec::new(), Vec::new());
    let mut end = 0;
    for tensor in &many {
        let (one, _) = build(std::slice::from_ref(tensor), &[], 1).unwrap();
        let n_bytes: u64 = tensor.2.iter().product();
        let own = format!("[0,{n_bytes}]}}");
        let one = std::str::from_utf8(&one[9..one.len() - 1]).unwrap();
        entries.push(one.replace(&own, &format!("[{end},{}]}}", end + n_bytes)));
        at.push(end);
        end += n_bytes;
    }
    assert_eq!(header, format!("{{{}}}", entries.join(",")));
    assert_eq!(starts, at);
    for (first, second) in [(0, 11_999), (11_998, 11_999), (0, 1)] {
        let mut twice = many.clone();
        twice[second].0 = twice[first].0.clone();
        let error = build(&twice, &[], 8).unwrap_err();
        assert!(error.message().contains("the name occurs twice"), "{error}");
        assert_eq!(error.facts().1, Some(&*twice[first].0));
    }
}
