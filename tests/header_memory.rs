//! Parsing a header takes at most twice the size of the header plus 32 MiB, for any header.
//!
//! This is a separate test binary, because it counts every allocation of the process.
#![expect(unsafe_code, reason = "an allocator can be counted only by being one")]

use reshard_core::header::Header;
use reshard_core::source::{Method, Source};
use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// `realloc` is the default one: allocate, copy, free. The old and the new block are both counted.
// SAFETY: every call is forwarded to the system allocator unchanged; the counters do not access its memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(
            NOW.fetch_add(layout.size(), Relaxed) + layout.size(),
            Relaxed,
        );
        // SAFETY: the caller fulfils the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller fulfils the contract, which is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MB: usize = 1_000_000;

/// `{"0":{...},"1":{...},...}` of empty tensors; their numbers are multiplied by `stride` to mix the order of the
/// names.
fn empty_tensors(n: usize, shape: &str, stride: usize) -> Vec<u8> {
    let mut json = String::with_capacity(n * (shape.len() + 70));
    for i in 0..n {
        let separator = if i == 0 { '{' } else { ',' };
        let name = i * stride % n;
        write!(
            json,
            r#"{separator}"{name}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}"#
        )
        .unwrap();
    }
    json.push('}');
    json.into_bytes()
}

fn metadata_of(n: usize) -> Vec<u8> {
    let mut json = String::with_capacity(n * 14);
    for i in 0..n {
        let before = if i == 0 { r#"{"__metadata__":{"# } else { "," };
        write!(json, r#"{before}"{i}":"""#).unwrap();
    }
    json.push_str("}}");
    json.into_bytes()
}

/// `before`, `middle` repeated up to `n_bytes`, `after`.
fn repeated(before: &str, middle: &str, after: &str, n_bytes: usize) -> Vec<u8> {
    let n = (n_bytes - before.len() - after.len()) / middle.len();
    [before, &middle.repeat(n), after].concat().into_bytes()
}

type Make = Box<dyn Fn() -> Vec<u8>>;

#[test]
fn the_worst_headers_stay_within_bounds() {
    let long = |before: &'static str, middle: &'static str, after: &'static str| -> Make {
        Box::new(move || repeated(before, middle, after, 70 * MB))
    };
    #[rustfmt::skip]
    let cases: Vec<(&str, Make, Option<&str>)> = vec![
        ("1,400,000 empty tensors", Box::new(|| empty_tensors(1_400_000, "0", 1)), Some("more than 1000000 tensors")),
        ("1,000,000 tensors in no order", Box::new(|| empty_tensors(1_000_000, "0,1,2,3", 7_919_003)), None),
        ("140,000 tensors of 32 dims", Box::new(|| empty_tensors(140_000, &["0"; 32].join(","), 1)), None),
        ("300,000 tensors of 32 dims", Box::new(|| empty_tensors(300_000, &["0"; 32].join(","), 1)), None),
        ("a shape of 35,000,000 dims", long(r#"{"w":{"dtype":"U8","shape":[0"#, ",0", r#"],"data_offsets":[0,0]}}"#), Some("more than 32 dims")),
        ("a shape of strings", long(r#"{"w":{"dtype":"U8","shape":[""#, r"\n", r#""],"data_offsets":[0,0]}}"#), Some("expected a plain integer")),
        ("a number of 70,000,000 digits", long(r#"{"w":{"dtype":"U8","shape":[1"#, "0", r#"],"data_offsets":[0,0]}}"#), Some("expected a plain integer")),
        ("a metadata string", long(r#"{"__metadata__":{"a":""#, "x", r#""}}"#), None),
        ("an escaped metadata string", long(r#"{"__metadata__":{"a":""#, r"\u00e9\n", r#""}}"#), None),
        ("a metadata string with one escape", long(r#"{"__metadata__":{"a":""#, "x", r#"\n"}}"#), None),
        ("a metadata key", long(r#"{"__metadata__":{""#, r"\\", r#"":""}}"#), None),
        ("1,000,000 metadata entries", Box::new(|| metadata_of(1_000_000)), None),
        ("7,000,000 metadata entries", Box::new(|| metadata_of(7_000_000)), Some("more than 1000000 entries")),
        ("a name", long(r#"{""#, "x", r#"":{}}"#), Some("more than 1024 bytes")),
        ("an escaped name", long(r#"{""#, r"\t", r#"":{}}"#), Some("more than 1024 bytes")),
        ("an unknown field", long(r#"{"w":{""#, r"\t", r#"":0}}"#), Some("more than 1024 bytes")),
        ("a dtype", long(r#"{"w":{"dtype":""#, r"\t", r#""}}"#), Some("more than 1024 bytes")),
        ("a text for an entry", long(r#"{"w":""#, r"\t", r#""}"#), Some("expected `{`")),
        ("deep lists", long(r#"{"w":{"shape":"#, "[", ""), Some("expected a plain integer")),
        ("deep objects", long("{", r#""w":{"#, ""), Some("unknown field")),
        ("a string without an end", long(r#"{""#, "x", ""), Some("has no end")),
        ("only spaces after it", long("{}", " ", ""), None),
        ("something after spaces", long("{}", " ", "x"), Some("only spaces")),
    ];
    for (name, make, refused) in cases {
        let mut json = make();
        json.shrink_to_fit();
        let n_bytes = json.len();
        assert!(n_bytes <= 100 * MB, "{name}: {n_bytes} bytes");
        let before = NOW.load(Relaxed) - n_bytes;
        PEAK.store(0, Relaxed);
        let found = Header::parse(json, 0);
        let peak = PEAK.load(Relaxed).max(before + n_bytes) - before;
        let message = found.as_ref().err().map(|error| error.message().to_owned());
        match refused {
            None => assert_eq!(message, None, "{name}"),
            Some(part) => {
                assert!(
                    message
                        .as_ref()
                        .is_some_and(|message| message.contains(part)),
                    "{name}: {message:?}"
                );
            }
        }
        check_peak(name, peak, n_bytes);
    }

    // Reading the text from a file takes additional memory.
    let json = repeated(r#"{"__metadata__":{"a":""#, "x", r#""}}"#, 100 * MB);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&(json.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&json).unwrap();
    let source = Source::open(file.path(), true, Method::Read).unwrap();
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let header = Header::read(&source).unwrap();
    assert_eq!(header.data_start(), 8 + json.len() as u64);
    check_peak("a file", PEAK.load(Relaxed) - before, json.len());
}

fn check_peak(name: &str, peak: usize, n_bytes: usize) {
    let bound = 2 * n_bytes + (32 << 20);
    assert!(
        peak <= bound,
        "{name}: {peak} bytes at the peak for a header of {n_bytes}, allowed are {bound}"
    );
}
