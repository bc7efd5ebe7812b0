//! The parts of a data file that say where the tensors of its items lie, read with few calls.
//!
//! An item is an archive: its first members and its last ones are small. To open it takes some twenty reads. Small items
//! that follow each other are read together, and of a larger one both ends.

use super::Place;
use crate::zip::{Part, Window};
use reshard_core::Result;
use reshard_core::source::Source;

/// A larger item is not read as a whole. The comment at the end of an archive can have 64 KiB.
const MAX_SMALL_BYTES: u64 = 128 << 10;
const HEAD_BYTES: u64 = 4 << 10;
const TAIL_BYTES: u64 = 65 << 10;
/// Of small items together.
const MAX_BYTES: u64 = 1 << 20;

/// What was read.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    parts: [Part; 2],
}

impl Ahead {
    /// Reads what the first of these items needs, unless it was read with those before it. What lies beyond the end of the
    /// file is left out.
    pub(super) fn read(
        &mut self,
        source: &Source,
        mut places: impl Iterator<Item = Place>,
    ) -> Result<()> {
        let Some(Place {
            offset, n_bytes, ..
        }) = places.next()
        else {
            return Ok(());
        };
        let end = offset.saturating_add(n_bytes);
        if end > source.n_bytes() || self.parts[0].range(offset, n_bytes).is_some() {
            return Ok(());
        }
        let [first, last] = &mut self.parts;
        if n_bytes > MAX_SMALL_BYTES {
            read(source, first, offset, offset + HEAD_BYTES)?;
            return read(source, last, end - TAIL_BYTES, end);
        }
        let is_next = |end: u64, next: &Place| {
            let to = end.saturating_add(next.n_bytes);
            next.offset == end
                && next.n_bytes <= MAX_SMALL_BYTES
                && to <= source.n_bytes().min(offset.saturating_add(MAX_BYTES))
        };
        let mut until = end;
        for next in places {
            if !is_next(until, &next) {
                break;
            }
            until += next.n_bytes;
        }
        read(source, first, offset, until)
    }

    /// All bytes of an item, if they were read.
    pub(super) fn whole(&self, place: &Place) -> Option<&[u8]> {
        self.parts[0].range(place.offset, place.n_bytes)
    }

    /// An item.
    ///
    /// # Errors
    /// It does not lie in the file.
    pub(super) fn window<'a>(&'a self, source: &'a Source, place: &Place) -> Result<Window<'a>> {
        Ok(Window::new(source, place.offset, place.n_bytes)?.with(&self.parts))
    }
}

fn read(source: &Source, part: &mut Part, start: u64, end: u64) -> Result<()> {
    part.bytes.clear();
    part.bytes.resize((end - start) as usize, 0);
    part.start = start;
    source.read_at(start, &mut part.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use reshard_core::Error;
    use reshard_core::source::Ranges;
    use std::path::PathBuf;
    use std::sync::{Arc, Mutex};

    /// A file whose bytes are the positions, and the ranges that were read.
    #[derive(Debug)]
    struct Counted(Arc<Mutex<Vec<(u64, usize)>>>);

    impl Ranges for Counted {
        fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
            let mut reads = self.0.lock().map_err(|_| Error::damaged("a failure"))?;
            reads.push((start, to.len()));
            for (byte, at) in to.iter_mut().zip(start..) {
                *byte = at as u8;
            }
            Ok(())
        }
    }

    #[test]
    fn items_that_follow_each_other_are_read_at_once_and_of_large_ones_the_ends() {
        let place = |offset, n_bytes| Place {
            file: 0,
            transforms: 0,
            offset,
            n_bytes,
        };
        let (large, small) = (300_000, MAX_SMALL_BYTES);
        let places = [
            place(5, 100),
            place(105, 50),
            place(200, small),
            place(200 + small, large),
            place(200 + small + large, 10),
            place(1_000_000, 3_000_000), // beyond the end
        ];
        let reads = Arc::default();
        let counted = Box::new(Counted(Arc::clone(&reads)));
        let source = Source::of_ranges(PathBuf::from("some"), 2_000_000, counted);
        let mut ahead = Ahead::default();
        for (number, place) in places.iter().enumerate() {
            ahead
                .read(&source, places[number..].iter().copied())
                .unwrap();
            let window = ahead.window(&source, place);
            if number == 5 {
                assert!(window.unwrap_err().to_string().contains("beyond its end"));
                break;
            }
            for at in [0, place.n_bytes - 1] {
                let expected = [(place.offset + at) as u8];
                assert_eq!(*window.as_ref().unwrap().read(at, 1).unwrap(), expected);
            }
        }
        let (head, tail) = (HEAD_BYTES as usize, TAIL_BYTES as usize);
        let expected = [
            (5, 150),
            (200, small as usize),
            (200 + small, head),
            (200 + small + large - TAIL_BYTES, tail),
            (200 + small + large, 10),
        ];
        assert_eq!(*reads.lock().unwrap(), expected);
    }
}
