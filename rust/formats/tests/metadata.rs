//! `metadata.json`: real files are decoded correctly, and inconsistent files are rejected.

#![expect(clippy::too_many_lines, reason = "tables of cases")]

use proptest::prelude::*;
use reshard_core::Result;
use reshard_core::error::Kind;
use reshard_formats::metadata::{Metadata, decode, parse_storage_key, storage_key};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A tensor in two shards, with a single quote in its name, and a tensor that is not partitioned. Every case below
/// changes one place.
const BASE: &str = r#"{
    "state_dict_metadata": {
        "it's": {
            "properties": {"dtype": "Float32", "replica_id": [0, 0], "allow_shape_mismatch": false},
            "global_shape": [4, 2],
            "axis_fragmentations": [2, 1],
            "layout": {
                "device_matrix": [2, 1],
                "tensor_map": [[1, 0], -1],
                "interleaved_parallel": false,
                "alias_name": ["dp", "tp"],
                "rank_list": [4, 5]
            },
            "chunk": [{"global_offset": [0], "local_shape": [2, 2]}, {"global_offset": [1], "local_shape": [2, 2]}]
        },
        "b": {
            "properties": {"dtype": "Int32", "replica_id": 0},
            "global_shape": [],
            "axis_fragmentations": [],
            "layout": null,
            "chunk": [{"global_offset": [0], "local_shape": []}]
        }
    },
    "storage_data": {
        "(\"it's\", (1,))": [{"file_name": "b.safetensors", "storage_rank": 5, "rank_group": [5]}],
        "('b', (0,))": [{"file_name": "a.safetensors", "storage_rank": 4}],
        "(\"it's\", (0,))": [
            {"file_name": "c.safetensor", "storage_rank": 6, "rank_group": [4, 6]},
            {"file_name": "a.safetensors", "storage_rank": 4, "rank_group": [4, 6]}
        ]
    }
}"#;

#[test]
fn decodes_the_base_file() {
    let Metadata {
        files,
        layouts,
        tensors,
    } = decode(BASE.as_bytes()).unwrap();
    assert_eq!(files, ["b.safetensors", "a.safetensors", "c.safetensor"]);
    assert_eq!(layouts.len(), 1);
    assert_eq!(layouts[0].device_matrix, [2, 1]);
    assert_eq!(layouts[0].tensor_map, [vec![1, 0], vec![]]);
    assert_eq!(layouts[0].alias_name, ["dp", "tp"]);
    assert_eq!(layouts[0].rank_list, [4, 5]);
    let [w, b] = &tensors[..] else {
        panic!("{tensors:?}")
    };
    assert_eq!(
        (&*w.name, &*w.dtype, w.layout),
        ("it's", "Float32", Some(0))
    );
    assert_eq!(
        (&w.shape[..], &w.fragmentations[..]),
        (&[4, 2][..], &[2, 1][..])
    );
    assert_eq!(w.cells.n_cells(), 2);
    assert_eq!(w.cells.holders(0), [(1, 4), (2, 6)]);
    assert_eq!(w.cells.holders(1), [(0, 5)]);
    assert_eq!((&*b.name, &*b.dtype, b.layout), ("b", "Int32", None));
    assert_eq!(b.cells.holders(0), [(1, 4)]);
}

/// The same file after one change.
fn changed(from: &str, to: &str) -> Result<Metadata> {
    assert_eq!(
        BASE.matches(from).count(),
        1,
        "`{from}` must occur once in the base file"
    );
    decode(BASE.replace(from, to).as_bytes())
}

const LAYOUT: &str = r#"{
                "device_matrix": [2, 1],
                "tensor_map": [[1, 0], -1],
                "interleaved_parallel": false,
                "alias_name": ["dp", "tp"],
                "rank_list": [4, 5]
            }"#;
const CHUNK_1: &str = r#", {"global_offset": [1], "local_shape": [2, 2]}"#;
const STORED_1: &str = r#""(\"it's\", (1,))": [{"file_name": "b.safetensors", "storage_rank": 5, "rank_group": [5]}],"#;
const FILE: &str = r#""file_name": "b.safetensors""#;

#[test]
fn equivalent_files_decode_to_the_same() {
    #[rustfmt::skip]
    let cases = [
        ("unknown fields", r#""layout": null,"#, r#""layout": null, "x": {"y": [[1.5, -1e9], null, "z\n"]}, "z": true,"#),
        ("null values of ignored fields", r#""replica_id": 0"#, r#""replica_id": null"#),
        ("a chunk repeated", CHUNK_1, r#", {"local_shape": [2, 2], "global_offset": [1]}, {"global_offset": [1], "local_shape": [2, 2]}"#),
        ("a holder repeated", r#"{"file_name": "a.safetensors", "storage_rank": 4}"#, r#"{"file_name": "a.safetensors", "storage_rank": 4}, {"storage_rank": 4, "file_name": "a.safetensors"}"#),
        ("a file repeated with another rank", r#"{"file_name": "a.safetensors", "storage_rank": 4}"#, r#"{"file_name": "a.safetensors", "storage_rank": 9}, {"file_name": "a.safetensors", "storage_rank": 4}"#),
        ("escapes", r#""file_name": "c.safetensor""#, r#""file\u005fname": "\u0063.safetensor""#),
        ("-1 in a nested list", "[[1, 0], -1]", "[[1, -1, 0], [-1]]"),
        ("an axis of size one left out", "[[1, 0], -1]", "[1, -1]"),
    ];
    let mut base = decode(BASE.as_bytes()).unwrap();
    for (name, from, to) in cases {
        let mut found = changed(from, to).unwrap_or_else(|error| panic!("{name}: {error}"));
        found.layouts[0].tensor_map.clear();
        base.layouts[0].tensor_map.clear();
        assert_eq!(found, base, "{name}");
    }
}

#[test]
fn sections_in_either_order() {
    let value: Value = serde_json::from_str(BASE).unwrap();
    let (tensors, storage) = (&value["state_dict_metadata"], &value["storage_data"]);
    let late = decode(
        format!(r#"{{"state_dict_metadata":{tensors},"storage_data":{storage}}}"#).as_bytes(),
    )
    .unwrap();
    let early = decode(
        format!(r#"{{"storage_data":{storage},"state_dict_metadata":{tensors}}}"#).as_bytes(),
    )
    .unwrap();
    assert_eq!(late, early);
}

#[test]
fn rejects_invalid_files() {
    use Kind::{Coverage, Damaged, Unsupported};
    const W: Option<&str> = Some("it's");
    const B: Option<&str> = Some("b");
    #[rustfmt::skip]
    let cases = [
        // The JSON itself.
        ("no JSON", BASE, "", Damaged, None, "EOF while parsing"),
        ("truncated", "\n    }\n}", "", Damaged, None, "EOF while parsing"),
        ("something after it", "\n    }\n}", "\n}} x", Damaged, None, "trailing characters"),
        ("a trailing comma", r#""layout": null,"#, r#""layout": null,,"#, Damaged, B, "key must be a string"),
        ("no object", BASE, "[]", Damaged, None, "expected an object with state_dict_metadata, storage_data"),
        ("NaN", r#""replica_id": 0"#, r#""replica_id": NaN"#, Damaged, B, "expected value"),
        ("a lone surrogate", r#""dtype": "Int32""#, r#""dtype": "\ud800""#, Damaged, B, "hex escape"),
        // Sections.
        ("no tensors", r#""state_dict_metadata""#, r#""other""#, Damaged, None, "no `state_dict_metadata`"),
        ("no storage", r#""storage_data""#, r#""other""#, Damaged, None, "no `storage_data`"),
        ("storage of the wrong type", BASE, r#"{"state_dict_metadata": {}, "storage_data": []}"#, Damaged, None, "expected an object of storage keys"),
        ("tensors of the wrong type", BASE, r#"{"state_dict_metadata": 1, "storage_data": {}}"#, Damaged, None, "expected an object of tensors"),
        // Twice.
        ("section twice", BASE, r#"{"state_dict_metadata": {}, "storage_data": {}, "storage_data": {}}"#, Damaged, None, "field `storage_data` occurs twice"),
        ("tensor twice", r#""b": {"#, r#""it's": {"#, Damaged, W, "listed twice"),
        ("field twice", r#""layout": null"#, r#""layout": null, "layout": null"#, Damaged, B, "field `layout` occurs twice"),
        ("escaped field twice", r#""layout": null"#, r#""layout": null, "l\u0061yout": null"#, Damaged, B, "field `layout` occurs twice"),
        ("field of properties twice", r#""dtype": "Int32""#, r#""dtype": "Int32", "dtype": "Int32""#, Damaged, B, "field `dtype` occurs twice"),
        ("field of layout twice", r#""device_matrix": [2, 1],"#, r#""device_matrix": [2, 1], "device_matrix": [2, 1],"#, Damaged, W, "field `device_matrix` occurs twice"),
        ("field of a chunk twice", r#"[{"global_offset": [0], "local_shape": []}]"#, r#"[{"global_offset": [0], "global_offset": [0], "local_shape": []}]"#, Damaged, B, "field `global_offset` occurs twice"),
        ("ignored field twice", r#""replica_id": 0"#, r#""replica_id": 0, "replica_id": 0"#, Damaged, B, "field `replica_id` occurs twice"),
        ("unknown field twice", r#""layout": null"#, r#""layout": null, "x": 1, "x": 1"#, Damaged, B, "field `x` occurs twice"),
        ("key in a skipped value twice", r#""layout": null"#, r#""layout": null, "x": {"y": 1, "y": 1}"#, Damaged, B, "key `y` occurs twice"),
        ("storage key twice", STORED_1, &[STORED_1, STORED_1].concat(), Damaged, W, "has `(\"it's\", (1,))` twice"),
        ("storage key in two spellings", r#""('b', (0,))": ["#, r#""(\"b\", (0,))": [{"file_name": "a.safetensors", "storage_rank": 4}], "('b', (0,))": ["#, Damaged, B, "has `('b', (0,))` twice"),
        ("field of a holder twice", FILE, &[FILE, ", ", FILE].concat(), Damaged, None, "field `file_name` occurs twice"),
        // Limits.
        ("deep nesting", r#""layout": null"#, r#""layout": null, "x": [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]"#, Damaged, B, "nested deeper than 16"),
        ("deep nesting in an ignored field", r#""replica_id": 0"#, &format!(r#""replica_id": {}"#, "[".repeat(1_000_000)), Damaged, B, "nested deeper than 16"),
        ("too many dims", r#""global_shape": [4, 2]"#, &format!(r#""global_shape": [4, 2{}]"#, ", 1".repeat(31)), Damaged, W, "more than 32 entries"),
        ("size overflow", r#""global_shape": [4, 2]"#, r#""global_shape": [4611686018427387904, 2]"#, Damaged, W, "overflows"),
        ("too many shards", r#""axis_fragmentations": [2, 1]"#, r#""axis_fragmentations": [4294967296, 1]"#, Damaged, W, "invalid number of shards; expected 1 to 2^31"),
        ("empty name", r#""b": {"#, r#""": {"#, Damaged, Some(""), "empty"),
        ("control character in a name", r#""b": {"#, r#""b\u001b[2J": {"#, Damaged, Some("b\u{1b}[2J"), "control character"),
        ("long name", r#""b": {"#, &format!(r#""{}": {{"#, "b".repeat(1025)), Unsupported, Some(&*"b".repeat(1025)), "1025 bytes"),
        ("long dtype", r#""dtype": "Int32""#, &format!(r#""dtype": "{}""#, "I".repeat(65)), Damaged, B, "65 bytes"),
        // Types and numbers.
        ("tensor of the wrong type", r#""b": {"#, r#""c": 1, "b": {"#, Damaged, Some("c"), "expected an object with properties"),
        ("shape of the wrong type", r#""global_shape": []"#, r#""global_shape": 0"#, Damaged, B, "expected a list"),
        ("extent as text", r#""global_shape": [4, 2]"#, r#""global_shape": ["4", 2]"#, Damaged, W, "expected a plain integer"),
        ("negative extent", r#""global_shape": [4, 2]"#, r#""global_shape": [-4, 2]"#, Damaged, W, "expected a plain integer"),
        ("fractional extent", r#""global_shape": [4, 2]"#, r#""global_shape": [4.0, 2]"#, Damaged, W, "expected a plain integer"),
        ("extent with exponent", r#""global_shape": [4, 2]"#, r#""global_shape": [4e0, 2]"#, Damaged, W, "expected a plain integer"),
        ("extent of 2^63", r#""global_shape": [4, 2]"#, r#""global_shape": [9223372036854775808, 2]"#, Damaged, W, "from 0 to 2^63 - 1"),
        ("extent of 2^64", r#""global_shape": [4, 2]"#, r#""global_shape": [18446744073709551616, 2]"#, Damaged, W, "expected a plain integer"),
        ("dtype of the wrong type", r#""dtype": "Int32""#, r#""dtype": 3"#, Damaged, B, "expected a string"),
        ("interleaved of the wrong type", r#""interleaved_parallel": false"#, r#""interleaved_parallel": 0"#, Damaged, W, "expected a boolean"),
        ("storage rank as text", r#""storage_rank": 5"#, r#""storage_rank": "5""#, Damaged, None, "expected a plain integer"),
        // Missing fields.
        ("no properties", r#""properties": {"dtype": "Int32", "replica_id": 0},"#, "", Damaged, B, "`properties` is missing"),
        ("no dtype", r#""dtype": "Int32","#, "", Damaged, B, "`properties.dtype` is missing"),
        ("no shape", r#""global_shape": [],"#, "", Damaged, B, "`global_shape` is missing"),
        ("no fragmentations", r#""axis_fragmentations": [],"#, "", Damaged, B, "`axis_fragmentations` is missing"),
        ("no layout", r#""layout": null,"#, "", Damaged, B, "`layout` is missing"),
        ("no chunk", r#""chunk": [{"global_offset": [0], "local_shape": []}]"#, r#""x": 0"#, Damaged, B, "`chunk` is missing"),
        ("no offset of a chunk", r#"{"global_offset": [0], "local_shape": []}"#, r#"{"local_shape": []}"#, Damaged, B, "`global_offset` of a chunk is missing"),
        ("no shape of a chunk", r#"{"global_offset": [0], "local_shape": []}"#, r#"{"global_offset": [0]}"#, Damaged, B, "`local_shape` of a chunk is missing"),
        ("no device matrix", r#""device_matrix": [2, 1],"#, "", Damaged, W, "`layout.device_matrix` is missing"),
        ("no tensor map", r#""tensor_map": [[1, 0], -1],"#, "", Damaged, W, "`layout.tensor_map` is missing"),
        ("no interleaved", r#""interleaved_parallel": false,"#, "", Damaged, W, "`layout.interleaved_parallel` is missing"),
        ("no alias", r#""alias_name": ["dp", "tp"],"#, "", Damaged, W, "`layout.alias_name` is missing"),
        ("no ranks", r#""alias_name": ["dp", "tp"],"#, r#""alias_name": ["dp", "tp"], "rank": "#, Damaged, W, "expected `,` or `}`"),
        ("no file", r#"{"file_name": "a.safetensors", "storage_rank": 4}"#, r#"{"storage_rank": 4}"#, Damaged, B, "`file_name` is missing"),
        ("no storage rank", r#"{"file_name": "a.safetensors", "storage_rank": 4}"#, r#"{"file_name": "a.safetensors"}"#, Damaged, B, "`storage_rank` is missing"),
        // The grid.
        ("more fragmentations than dims", r#""axis_fragmentations": [2, 1]"#, r#""axis_fragmentations": [2, 1, 1]"#, Damaged, W, "has 2 dims, but `axis_fragmentations` [2, 1, 1] has 3"),
        ("no parts", r#""axis_fragmentations": [2, 1]"#, r#""axis_fragmentations": [0, 1]"#, Damaged, W, "invalid number of shards; expected 1 to 2^31"),
        ("uneven", r#""global_shape": [4, 2]"#, r#""global_shape": [5, 2]"#, Damaged, W, "no uneven shards"),
        ("null layout of a partitioned tensor", LAYOUT, "null", Damaged, W, "`layout` is null, which means not partitioned, but `axis_fragmentations` is [2, 1]"),
        ("fragmentation of a tensor without dims", r#""axis_fragmentations": []"#, r#""axis_fragmentations": [2]"#, Damaged, B, "has 0 dims"),
        ("chunk of another shape", CHUNK_1, r#", {"global_offset": [1], "local_shape": [1, 2]}"#, Damaged, W, "gives [2, 2]"),
        ("chunk outside", CHUNK_1, r#", {"global_offset": [2], "local_shape": [2, 2]}"#, Damaged, W, "makes 2 shards"),
        ("chunk at a position", CHUNK_1, r#", {"global_offset": [2, 0], "local_shape": [2, 2]}"#, Damaged, W, "must be one number"),
        ("chunk without a place", CHUNK_1, r#", {"global_offset": [], "local_shape": [2, 2]}"#, Damaged, W, "must be one number"),
        ("chunk missing", CHUNK_1, "", Coverage, W, "offset (2, 0) shape (2, 2) uncovered: `chunk` does not list it"),
        ("chunk missing before a repeated one", r#"{"global_offset": [0], "local_shape": [2, 2]}"#, r#"{"global_offset": [1], "local_shape": [2, 2]}"#, Coverage, W, "offset (0, 0)"),
        ("no chunk at all", r#"[{"global_offset": [0], "local_shape": []}]"#, "[]", Coverage, B, "offset () shape () uncovered"),
        // The layout.
        ("interleaved", r#""interleaved_parallel": false"#, r#""interleaved_parallel": true"#, Unsupported, W, "interleaved_parallel"),
        ("layout splits differently", "[[1, 0], -1]", "[-1, [1, 0]]", Damaged, W, "`layout` splits the dims into [1, 2] parts, but `axis_fragmentations` is [2, 1]"),
        ("tensor map too short", "[[1, 0], -1]", "[[1, 0]]", Damaged, W, "`layout` splits the dims into [2] parts"),
        ("axis beyond the mesh", "[[1, 0], -1]", "[[1, 2], -1]", Damaged, W, "has axis 2"),
        ("negative axis", "[[1, 0], -1]", "[[1, -2], -1]", Damaged, W, "expected an axis or -1"),
        ("axis used twice", "[[1, 0], -1]", "[[1, 0], 0]", Damaged, W, "uses axis 0 twice"),
        ("axis lists nested", "[[1, 0], -1]", "[[[1, 0]], -1]", Damaged, W, "expected an axis or -1"),
        ("fewer ranks than mesh points", r#""rank_list": [4, 5]"#, r#""rank_list": [4]"#, Damaged, W, "has 1 ranks"),
        ("a rank twice", r#""rank_list": [4, 5]"#, r#""rank_list": [4, 4]"#, Damaged, W, "rank 4 twice"),
        ("mesh without points", r#""device_matrix": [2, 1]"#, r#""device_matrix": [0, 1]"#, Damaged, W, "has 2 ranks"),
        ("mesh size overflow", r#""device_matrix": [2, 1]"#, r#""device_matrix": [9223372036854775807, 4]"#, Damaged, W, "has 2 ranks"),
        ("names of other axes", r#""alias_name": ["dp", "tp"]"#, r#""alias_name": ["dp"]"#, Damaged, W, "has 1 names"),
        ("axis name twice", r#""alias_name": ["dp", "tp"]"#, r#""alias_name": ["dp", "dp"]"#, Damaged, W, "`dp` twice"),
        // Storage.
        ("shard that no file holds", STORED_1, "", Coverage, W, "offset (2, 0) shape (2, 2) uncovered: `storage_data` lists no file for it"),
        ("empty list of files", r#"[{"file_name": "a.safetensors", "storage_rank": 4}]"#, "[]", Coverage, B, "no file holds it"),
        ("unknown tensor", r#""('b', (0,))""#, r#""('c', (0,))""#, Damaged, Some("c"), "has no tensor `c`"),
        ("unknown shard", r#""('b', (0,))""#, r#""('b', (1,))""#, Damaged, B, "makes 1 shards"),
        ("shard number of 2^64", r#""('b', (0,))""#, r#""('b', (18446744073709551616,))""#, Damaged, None, "expected a key like"),
        ("key without parentheses", r#""('b', (0,))""#, r#""'b', 0""#, Damaged, None, "expected a key like"),
        ("key of two offsets", r#""('b', (0,))""#, r#""('b', (0, 0))""#, Damaged, None, "expected a key like"),
        ("key of bytes", r#""('b', (0,))""#, r#""(b'b', (0,))""#, Damaged, None, "expected a key like"),
        ("file in the parent", FILE, r#""file_name": "../b.safetensors""#, Damaged, W, "names another folder"),
        ("file with an absolute path", FILE, r#""file_name": "/b.safetensors""#, Damaged, W, "names another folder"),
        ("file behind a backslash", FILE, r#""file_name": "..\\b.safetensors""#, Damaged, W, "names another folder"),
        ("file of an escaped slash", FILE, r#""file_name": "x\u002fb.safetensors""#, Damaged, W, "names another folder"),
        ("file with a NUL", FILE, r#""file_name": "b\u0000.safetensors""#, Damaged, W, "control character"),
        ("file `..`", FILE, r#""file_name": "..""#, Damaged, W, "is not a file name"),
        ("file `.`", FILE, r#""file_name": ".""#, Damaged, W, "is not a file name"),
        ("file without a name", FILE, r#""file_name": """#, Damaged, W, "is not a file name"),
        ("file of another kind", FILE, r#""file_name": "b.ckpt""#, Damaged, W, "does not end in .safetensors"),
        ("file of a long name", FILE, &format!(r#""file_name": "{}.safetensors""#, "b".repeat(244)), Unsupported, W, "256 bytes"),
    ];
    for (name, from, to, kind, key, message) in cases {
        let error = changed(from, to).expect_err(name);
        assert!(error.message().contains(message), "{name}: {error}");
        assert_eq!(error.kind(), kind, "{name}: {error}");
        assert_eq!(error.facts().1, key, "{name}: {error}");
        assert!(
            !error.message().contains(char::is_control),
            "{name}: {error:?}"
        );
    }
    let error = decode(b"{\"\xff\": 1}").unwrap_err();
    assert!(error.message().contains("not UTF-8 from byte 2"), "{error}");
}

/// Left: a name. Right: what Python 3.11 prints for `str((name, (7,)))`.
#[rustfmt::skip]
const STORAGE_KEYS: &[(&str, &str)] = &[
    ("", "('', (7,))"),
    ("decoder.layers.0.mlp.w1", "('decoder.layers.0.mlp.w1', (7,))"),
    ("a b", "('a b', (7,))"),
    ("it's", "(\"it's\", (7,))"),
    ("say \"x\"", "('say \"x\"', (7,))"),
    ("it's \"x\"", "('it\\'s \"x\"', (7,))"),
    ("a\\b", "('a\\\\b', (7,))"),
    ("a\\'b", "(\"a\\\\'b\", (7,))"),
    ("tab\u{9}new\u{a}line\u{d}end", "('tab\\tnew\\nline\\rend', (7,))"),
    ("\u{0}\u{7}\u{1f}\u{7f}", "('\\x00\\x07\\x1f\\x7f', (7,))"),
    ("\u{80}\u{9f}\u{a0}\u{ad}\u{ff}", "('\\x80\\x9f\\xa0\\xad\u{ff}', (7,))"),
    ("\u{e9}", "('\u{e9}', (7,))"),
    ("\u{fc}", "('\u{fc}', (7,))"),
    ("\u{65e5}\u{672c}", "('\u{65e5}\u{672c}', (7,))"),
    ("\u{300}combining", "('\u{300}combining', (7,))"),
    ("e\u{301}", "('e\u{301}', (7,))"),
    ("\u{200b}\u{200e}\u{2028}\u{2029}\u{202f}\u{3000}", "('\\u200b\\u200e\\u2028\\u2029\\u202f\\u3000', (7,))"),
    ("\u{feff}", "('\\ufeff', (7,))"),
    ("\u{fffd}", "('\u{fffd}', (7,))"),
    ("\u{fdd0}\u{ffff}", "('\\ufdd0\\uffff', (7,))"),
    ("\u{e000}", "('\\ue000', (7,))"),
    ("\u{1f600}", "('\u{1f600}', (7,))"),
    ("\u{1f468}\u{200d}\u{1f469}", "('\u{1f468}\\u200d\u{1f469}', (7,))"),
    ("\u{e0001}\u{f0000}\u{10ffff}", "('\\U000e0001\\U000f0000\\U0010ffff', (7,))"),
    ("\u{20000}\u{2a6df}", "('\u{20000}\u{2a6df}', (7,))"),
    ("\u{378}", "('\\u0378', (7,))"),
    ("\u{61c}\u{6dd}\u{70f}", "('\\u061c\\u06dd\\u070f', (7,))"),
    ("\u{1680}\u{2000}\u{205f}", "('\\u1680\\u2000\\u205f', (7,))"),
    ("a, (1,))", "('a, (1,))', (7,))"),
    ("('b', (0,))", "(\"('b', (0,))\", (7,))"),
    ("', (0,))", "(\"', (0,))\", (7,))"),
    ("x, (", "('x, (', (7,))"),
    ("\u{1d173}", "('\\U0001d173', (7,))"),
    ("\u{a66e}", "('\u{a66e}', (7,))"),
    ("a,b", "('a,b', (7,))"),
    ("{}", "('{}', (7,))"),
    ("\u{b2}\u{2460}", "('\u{b2}\u{2460}', (7,))"),
];

#[test]
fn storage_keys_are_pythons() {
    for &(name, key) in STORAGE_KEYS {
        assert_eq!(storage_key(name, 7), key);
        assert_eq!(parse_storage_key(key).unwrap(), (name.into(), 7), "{key}");
    }
}

#[test]
fn storage_keys_that_python_does_not_print() {
    #[rustfmt::skip]
    let keys = [
        "", "(", "(',))", "('a')", "('a', 0)", "('a', (0))", "('a', (0,)", "('a', (,))", "('a', (-1,))", "('a', (+1,))", "('a', (01,))",
        "('a', (0x1,))", "('a', (1_0,))", "('a', ( 1,))", "('a',  (1,))", "('a',(1,))", "(a, (1,))", "('a\", (1,))", "('a'b', (1,))",
        "('a\\', (1,))", "('\\q', (1,))", "('\\x4', (1,))", "('\\ud800', (1,))", "('\\U00110000', (1,))", "(', (1,))", " ('a', (1,))",
        "('a', (1,)) ", "('a', (1,),)", "('a', (1.0,))",
    ];
    for key in keys {
        assert_eq!(parse_storage_key(key).expect_err(key).kind(), Kind::Damaged);
    }
}

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/mindspore")
}

#[test]
fn real_files_are_decoded() {
    let cases = [
        "ckpt2/checkpoint/iteration_00000005",
        "ckpt2/checkpoint/iteration_00000010",
        "ckpt2_dedup/checkpoint/iteration_00000005",
        "ckpt2_dedup/checkpoint/iteration_00000010",
        "ckpt2_named/checkpoint/iteration_00000007",
    ];
    for folder in cases {
        let text = fs::read(samples().join(folder).join("metadata.json")).unwrap();
        let metadata = decode(&text).unwrap();
        let value: Value = serde_json::from_slice(&text).unwrap();
        let listed = value["state_dict_metadata"].as_object().unwrap();
        assert_eq!(metadata.tensors.len(), listed.len());
        let mut n_keys = 0;
        for tensor in &metadata.tensors {
            let record = &listed[&*tensor.name];
            assert_eq!(record["properties"]["dtype"], *tensor.dtype);
            assert_eq!(record["global_shape"], Value::from(tensor.shape.clone()));
            assert_eq!(
                record["axis_fragmentations"],
                Value::from(tensor.fragmentations.clone())
            );
            let layout = tensor.layout.map(|id| &metadata.layouts[id as usize]);
            assert_eq!(record["layout"].is_null(), layout.is_none());
            if let Some(layout) = layout {
                assert_eq!(
                    record["layout"]["device_matrix"],
                    Value::from(layout.device_matrix.clone())
                );
                assert_eq!(
                    record["layout"]["rank_list"],
                    Value::from(layout.rank_list.clone())
                );
                assert_eq!(
                    record["layout"]["alias_name"],
                    Value::from(layout.alias_name.clone())
                );
            }
            for cell in 0..tensor.cells.n_cells() {
                let key = format!("('{}', ({cell},))", tensor.name);
                let expected: BTreeSet<_> = value["storage_data"][&key]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|entry| {
                        (
                            entry["file_name"].as_str().unwrap(),
                            entry["storage_rank"].as_u64().unwrap(),
                        )
                    })
                    .collect();
                let holders = tensor.cells.holders(cell).iter();
                let found = holders
                    .map(|&(file, rank)| (metadata.files[file as usize].as_str(), rank))
                    .collect();
                assert_eq!(expected, found, "{folder}: {key}");
                n_keys += 1;
            }
        }
        assert_eq!(n_keys, value["storage_data"].as_object().unwrap().len());
        for file in &metadata.files {
            assert!(samples().join(folder).join(file).is_file(), "{file}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn storage_keys_read_back(name in any::<String>(), offset in any::<u64>()) {
        let key = storage_key(&name, offset);
        prop_assert_eq!(parse_storage_key(&key).unwrap(), (name.into(), offset));
    }

    /// One byte is changed, removed or added: an error, or consistent tables.
    #[test]
    fn a_changed_file_is_rejected_or_consistent(at in 0..BASE.len(), byte in any::<u8>(), kind in 0..3) {
        let mut text = BASE.as_bytes().to_vec();
        match kind {
            0 => text[at] = byte,
            1 => drop(text.remove(at)),
            _ => text.insert(at, byte),
        }
        let Ok(metadata) = decode(&text) else { return Ok(()) };
        for tensor in &metadata.tensors {
            prop_assert_eq!(tensor.cells.n_cells() as u64, tensor.fragmentations.iter().product::<u64>());
            for cell in 0..tensor.cells.n_cells() {
                prop_assert!(!tensor.cells.holders(cell).is_empty());
                prop_assert!(tensor.cells.holders(cell).iter().all(|&(file, _)| (file as usize) < metadata.files.len()));
            }
            prop_assert!(tensor.layout.is_none_or(|id| (id as usize) < metadata.layouts.len()));
        }
    }
}
