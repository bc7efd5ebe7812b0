//! Items that differ from one that was decoded before only in what the reader does not look at: the content of the
//! tensor, and its CRC.
//!
//! The items of the layers of a model are archives with the same names, sizes and pickle. Each one is compared with those
//! before it, byte by byte apart from the contents of members that no reader opens, and from their CRCs. If all is equal,
//! it would be decoded as they were.

use crate::torch_file::{Storage, Tensor};
use crate::zip::{CRC_AT, END, Window, members};
use reshard_core::dtype::Dtype;
use std::ops::Range;

/// Items that are kept. A layer of a model has some ten shapes.
const MAX_KEPT: usize = 16;
/// Bytes of an item that are kept: its pickle and the headers of its members take about 1,000.
const MAX_BYTES: usize = 8 << 10;
const CRC_BYTES: usize = 4;

/// Items of one file.
#[derive(Debug, Default)]
pub(super) struct Alike {
    kept: Vec<Kept>,
    /// The one that is replaced next.
    next: usize,
}

/// What was decoded of an item.
#[derive(Debug)]
struct Kept {
    n_bytes: usize,
    /// The ranges that may differ, ascending.
    free: Vec<Range<usize>>,
    /// The bytes between them.
    fixed: Vec<u8>,
    /// Where the CRC of the storage is.
    crc_at: usize,
    /// Its position is in the item.
    storage: Storage,
    tensor: Tensor,
}

impl Alike {
    /// The tensor of an item and its storage, if an equal item was kept.
    pub(super) fn find(
        &self,
        item: &[u8],
        dtype: Dtype,
        shape: &[u64],
        start: u64,
    ) -> Option<(Storage, Tensor)> {
        let is_same = |one: &&Kept| {
            one.n_bytes == item.len()
                && one.tensor.dtype == dtype
                && one.tensor.shape == shape
                && one.is_equal(item)
        };
        let kept = self.kept.iter().find(is_same)?;
        let crc = item.get(kept.crc_at..)?.first_chunk::<CRC_BYTES>()?;
        let crc = u32::from_le_bytes(*crc);
        let storage = Storage {
            start: start + kept.storage.start,
            crc: (crc != 0).then_some(crc),
            ..kept.storage.clone()
        };
        Some((storage, kept.tensor.clone()))
    }

    /// Keeps an item, which is all of a window, and what was decoded of it.
    pub(super) fn keep(
        &mut self,
        window: Window<'_>,
        item: &[u8],
        storage: &Storage,
        tensor: &Tensor,
    ) {
        let Some(kept) = Kept::of(window, item, storage, tensor) else {
            return;
        };
        if self.kept.len() < MAX_KEPT {
            self.kept.push(kept);
        } else {
            self.kept[self.next] = kept;
            self.next = (self.next + 1) % MAX_KEPT;
        }
    }
}

impl Kept {
    /// `None`: it is no archive, or it has too much beside its contents.
    fn of(window: Window<'_>, item: &[u8], storage: &Storage, tensor: &Tensor) -> Option<Self> {
        let start = window.start();
        let in_item = |at: u64| usize::try_from(at.checked_sub(start)?).ok();
        let (mut free, mut crc_at) = (Vec::new(), None);
        let members = members(window).ok()?;
        let directory = members.iter().map(|one| one.crc_at).min()? - CRC_AT;
        let headers = members.iter().skip(1).map(|next| next.header);
        for (member, end) in members.iter().zip(headers.chain([directory])) {
            let is_content = member.start == storage.start;
            if is_content || member.name.ends_with("/.data/serialization_id") {
                // What may follow the content, up to the next header, is its CRC once more: no reader looks at it.
                free.push(in_item(member.start)?..in_item(end)?);
                let crc = in_item(member.crc_at)?;
                free.push(crc..crc + CRC_BYTES);
                crc_at = crc_at.or(is_content.then_some(crc));
            }
        }
        free.sort_unstable_by_key(|range| range.start);
        let n_free: usize = free.iter().map(ExactSizeIterator::len).sum();
        if item.len().checked_sub(n_free)? > MAX_BYTES {
            return None;
        }
        let mut kept = Self {
            n_bytes: item.len(),
            free,
            fixed: Vec::new(),
            crc_at: crc_at?,
            storage: Storage {
                start: storage.start.checked_sub(start)?,
                ..storage.clone()
            },
            tensor: tensor.clone(),
        };
        let fixed: Vec<&[u8]> = kept.fixed_of(item).collect();
        kept.fixed = fixed.concat();
        Some(kept)
    }

    /// The bytes of an item between the ranges that may differ.
    fn fixed_of<'a>(&'a self, item: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let starts = std::iter::once(0).chain(self.free.iter().map(|range| range.end));
        let ends = self.free.iter().map(|range| range.start);
        let ends = ends.chain(std::iter::once(item.len()));
        starts.zip(ends).map(|(start, end)| &item[start..end])
    }

    /// Whether an item of the same size is decoded as this one.
    fn is_equal(&self, item: &[u8]) -> bool {
        let mut rest = &self.fixed[..];
        for fixed in self.fixed_of(item) {
            let Some(after) = rest.strip_prefix(fixed) else {
                return false;
            };
            rest = after;
        }
        // The reader looks everywhere in the last bytes for the record at the end, which must be there once.
        let more = END.len() - 1;
        self.free.iter().all(|range| {
            let end = item.len().min(range.end + more);
            !has_end(&item[range.start.saturating_sub(more)..end])
        })
    }
}

/// Whether there is the signature of the end record of an archive.
fn has_end(mut bytes: &[u8]) -> bool {
    while let Some(at) = bytes.iter().position(|byte| *byte == END[0]) {
        bytes = &bytes[at..];
        if bytes.starts_with(&END) {
            return true;
        }
        bytes = &bytes[1..];
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dcp::item_tensor;
    use reshard_core::Result;
    use reshard_core::source::{Ranges, Source};
    use std::path::{Path, PathBuf};

    #[derive(Debug)]
    struct Bytes(Vec<u8>);

    impl Ranges for Bytes {
        fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
            to.copy_from_slice(&self.0[start as usize..][..to.len()]);
            Ok(())
        }
    }

    fn source(bytes: Vec<u8>) -> Source {
        Source::of_ranges(
            PathBuf::from("some"),
            bytes.len() as u64,
            Box::new(Bytes(bytes)),
        )
    }

    /// Each byte of an item, changed: what is found is what is decoded.
    #[test]
    fn an_item_that_is_found_is_decoded_so() {
        let path = "../../tests/data/torch/mcore_v016_tp2/checkpoint/iter_0000120";
        let metadata = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let bytes = std::fs::read(metadata.join(".metadata")).unwrap();
        let dcp = crate::dcp::Dcp::decode(&bytes).unwrap();
        let name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight";
        let tensor = dcp.tensors.iter().find(|one| one.name == name).unwrap();
        let (dtype, chunk) = (tensor.dtype.clone().unwrap(), tensor.chunks.get(0));
        let place = chunk.place;
        let file = std::fs::read(metadata.join(&dcp.files[place.file as usize])).unwrap();
        let from = place.offset as usize;
        let item = &file[from..from + place.n_bytes as usize];
        let before = 64;
        let placed = |item: &[u8]| [&[0; 64], item].concat();

        let mut alike = Alike::default();
        let whole = source(placed(item));
        let window = Window::new(&whole, before, place.n_bytes).unwrap();
        let (storage, first) = item_tensor(window, dtype, chunk.shape).unwrap();
        alike.keep(window, item, &storage, &first);
        let n = storage.n_bytes as usize;
        let content = (storage.start - before) as usize;

        let (mut n_found, mut changed) = (0, item.to_vec());
        for at in 0..item.len() {
            for byte in [0, item[at] ^ 1, item[at].wrapping_add(1)] {
                changed[at] = byte;
                let opened = source(placed(&changed));
                let window = Window::new(&opened, before, place.n_bytes).unwrap();
                if let Some(found) = alike.find(&changed, dtype, chunk.shape, before) {
                    n_found += 1;
                    assert_eq!(found, item_tensor(window, dtype, chunk.shape).unwrap());
                } else {
                    assert!(!(content..content + n).contains(&at), "byte {at}");
                }
            }
            changed[at] = item[at];
        }
        assert!(n_found >= 3 * (n + CRC_BYTES), "{n_found}");
        assert_eq!(alike.find(item, dtype, &[1, 2, 3], before), None);
        assert_eq!(alike.find(&item[1..], dtype, chunk.shape, before), None);

        // Another item of the same shape, with its own content, CRC and number.
        let others = dcp.tensors.iter().filter_map(|other| {
            let chunk = other.chunks.iter().next()?;
            let is_other = other.name != tensor.name && chunk.place.file == place.file;
            let from = chunk.place.offset as usize;
            let is_same = other.dtype == tensor.dtype && chunk.shape == tensor.chunks.get(0).shape;
            (is_other && is_same).then(|| &file[from..from + chunk.place.n_bytes as usize])
        });
        let mut n_others = 0;
        for other in others {
            let opened = source(placed(other));
            let window = Window::new(&opened, before, other.len() as u64).unwrap();
            let expected = item_tensor(window, dtype, chunk.shape).unwrap();
            let found = alike.find(other, dtype, chunk.shape, before);
            assert_eq!(found, Some(expected));
            n_others += 1;
        }
        assert!(n_others > 0);

        // An end record in the content: the archive is refused, whatever was kept.
        assert!(n > END.len());
        for at in [content - 2, content, content + n - 4, content + n - 2] {
            let mut changed = item.to_vec();
            changed[at..at + 4].copy_from_slice(&END);
            assert_eq!(alike.find(&changed, dtype, chunk.shape, before), None);
        }
    }

    #[test]
    fn the_signature_of_an_end_record_is_found_anywhere() {
        assert!(has_end(b"PPK\x05\x06"));
        assert!(has_end(b"PK\x05PK\x05\x06xx"));
        assert!(!has_end(b"PK\x05PK\x05"));
        assert!(!has_end(b""));
    }
}
