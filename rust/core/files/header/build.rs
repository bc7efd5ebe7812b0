//! The writer of headers, with the limits of the parser.

use super::tokens::NUMBER_END;
use super::{
    LENGTH_BYTES, MAX_HEADER_BYTES, MAX_RANK, MAX_TENSORS, METADATA, all_bytes, check_name,
    tensor_bytes,
};
use crate::error::{Error, Kind, Printable, Result};
use crate::geometry::dtype::Dtype;
use std::collections::HashSet;

/// Bytes of an entry beside the name, mostly.
const ENTRY_BYTES: usize = 96;
/// From this many tensors on, a second thread takes less time than its start.
const MANY_TENSORS: usize = 10_000;

/// Builds the header of a file with tensors in the given order, without gaps.
///
/// Returns the length field, the compact JSON and padding up to a multiple of `align_bytes`, where the data begins, and
/// the first byte of each tensor, counted from there. Metadata comes first, sorted by key; it is omitted if it is
/// empty.
///
/// # Errors
/// [`Kind::Argument`] for an invalid or duplicate name or shape, [`Kind::Unsupported`] if a limit is exceeded.
///
/// ```
/// use reshard_core::dtype::Dtype;
/// use reshard_core::header::build;
///
/// let (header, starts) = build(&[("a", Dtype::F32, &[2]), ("b", Dtype::U8, &[])], &[], 64)?;
/// assert_eq!((header.len(), starts), (128, vec![0, 8]));
/// # Ok::<(), reshard_core::Error>(())
/// ```
pub fn build(
    tensors: &[(&str, Dtype, &[u64])],
    metadata: &[(String, String)],
    align_bytes: u64,
) -> Result<(Vec<u8>, Vec<u64>)> {
    let too_large = |what: String| Error::new(Kind::Unsupported, what).hint("write several files");
    if align_bytes == 0 {
        return Err(Error::new(
            Kind::Argument,
            "`align_bytes` is 0; expected at least 1",
        ));
    }
    if tensors.len() > MAX_TENSORS {
        return Err(too_large(format!(
            "{} tensors in one file; at most {MAX_TENSORS} are allowed",
            tensors.len()
        )));
    }
    let mut metadata: Vec<_> = metadata.iter().collect();
    metadata.sort();
    if let Some(pair) = metadata.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(Error::new(
            Kind::Argument,
            format!("metadata key `{}` occurs twice", Printable(&pair[0].0)),
        ));
    }

    let mut out = vec![0; LENGTH_BYTES as usize];
    out.push(b'{');
    if !metadata.is_empty() {
        for (i, (key, value)) in metadata.iter().enumerate() {
            out.extend_from_slice(if i == 0 { b"\"__metadata__\":{" } else { b"," });
            push_json(&mut out, key);
            out.push(b':');
            push_json(&mut out, value);
        }
        out.push(b'}');
    }
    let names: usize = tensors.iter().map(|(name, ..)| name.len()).sum();
    out.reserve(names + tensors.len() * ENTRY_BYTES);
    // Where another thread is free, the names are compared beside the text.
    let (added, unique) = if tensors.len() < MANY_TENSORS {
        (push_tensors(&mut out, tensors), check_unique(tensors))
    } else {
        rayon::join(|| push_tensors(&mut out, tensors), || check_unique(tensors))
    };
    let starts = added?;
    unique?;
    out.push(b'}');
    let n_bytes = (out.len() as u64).next_multiple_of(align_bytes);
    let header_bytes = n_bytes - LENGTH_BYTES;
    if header_bytes > MAX_HEADER_BYTES {
        return Err(too_large(format!(
            "a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed"
        )));
    }
    out.resize(n_bytes as usize, b' ');
    out[..LENGTH_BYTES as usize].copy_from_slice(&header_bytes.to_le_bytes());
    Ok((out, starts))
}

/// Appends the entries of tensors. Returns the first byte of each.
fn push_tensors(out: &mut Vec<u8>, tensors: &[(&str, Dtype, &[u64])]) -> Result<Vec<u64>> {
    let mut starts = Vec::with_capacity(tensors.len());
    let mut start = 0_u64;
    // Tensors that follow each other often have one dtype and shape: their bytes, and the text between name and offsets.
    let (mut last, mut n_bytes, mut text) = (None, 0, Vec::new());
    for &(name, dtype, shape) in tensors {
        let refuse = |kind, problem: String| Err(refused(name, kind, &problem));
        if let Err(error) = check_name(name) {
            return refuse(Kind::Argument, error.message().to_owned());
        }
        if name == METADATA {
            return refuse(Kind::Argument, "the name is reserved".to_owned());
        }
        if last != Some((dtype, shape)) {
            last = Some((dtype, shape));
            if shape.len() > MAX_RANK {
                return refuse(
                    Kind::Unsupported,
                    format!("{} dims; at most {MAX_RANK} are allowed", shape.len()),
                );
            }
            n_bytes = match tensor_bytes(dtype, shape) {
                Ok(n_bytes) => n_bytes,
                Err(problem) => return refuse(Kind::Argument, problem),
            };
            text.clear();
            push_kind(&mut text, dtype, shape);
        }
        let end = match start.checked_add(n_bytes) {
            Some(end) if end < NUMBER_END && shape.iter().all(|&extent| extent < NUMBER_END) => end,
            _ => {
                return refuse(
                    Kind::Argument,
                    format!("shape {shape:?} at byte {start} exceeds 2^63 - 1"),
                );
            }
        };
        if out.last() != Some(&b'{') {
            out.push(b',');
        }
        push_json(out, name);
        out.extend_from_slice(&text);
        push_number(out, start);
        out.push(b',');
        push_number(out, end);
        out.extend_from_slice(b"]}");
        starts.push(start);
        start = end;
    }
    Ok(starts)
}

/// Appends the text of a tensor behind its name, up to its offsets.
fn push_kind(out: &mut Vec<u8>, dtype: Dtype, shape: &[u64]) {
    out.extend_from_slice(b":{\"dtype\":\"");
    out.extend_from_slice(dtype.name().as_bytes());
    out.extend_from_slice(b"\",\"shape\":[");
    for (dim, &extent) in shape.iter().enumerate() {
        if dim > 0 {
            out.push(b',');
        }
        push_number(out, extent);
    }
    out.extend_from_slice(b"],\"data_offsets\":[");
}

fn check_unique(tensors: &[(&str, Dtype, &[u64])]) -> Result<()> {
    // Mostly they are sorted: to compare neighbours is faster than to make a set.
    if tensors.windows(2).all(|pair| pair[0].0 < pair[1].0) {
        return Ok(());
    }
    let mut names = HashSet::with_capacity(tensors.len());
    match tensors.iter().find(|(name, ..)| !names.insert(*name)) {
        None => Ok(()),
        Some((name, ..)) => Err(refused(name, Kind::Argument, "the name occurs twice")),
    }
}

fn refused(name: &str, kind: Kind, problem: &str) -> Error {
    Error::new(kind, format!("tensor `{}`: {problem}", Printable(name))).key(name)
}

fn push_number(out: &mut Vec<u8>, number: u64) {
    serde_json::to_writer(out, &number).expect("every number has a JSON form");
}

fn push_json(out: &mut Vec<u8>, text: &str) {
    let is_plain = |byte: u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
    if all_bytes(text, is_plain) {
        out.push(b'"');
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
        return;
    }
    serde_json::to_writer(out, text).expect("every string has a JSON form");
}
