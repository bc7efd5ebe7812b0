//! The header of a shard file: what is accepted, what is refused and how, and that the reference reader agrees.

use reshard_core::header::Header;
use safetensors::SafeTensors;
use std::io::Write;
use std::path::Path;

/// A file of a header's text and `data_bytes` zeros.
fn file_of(json: &[u8], data_bytes: usize) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json);
    file.resize(file.len() + data_bytes, 0);
    file
}

fn read(bytes: &[u8]) -> reshard_core::Result<Header> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    Header::read(&file, Path::new("shard.safetensors"), bytes.len() as u64)
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

/// The same by the reference implementation; its order among tensors without bytes is its own.
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
fn reads_what_is_there() {
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
