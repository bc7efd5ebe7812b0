//! Which arrays of a file hold values that are not finite: found while the file is written, as its checksums are.
//!
//! A value of a binary float is infinite or NaN if all bits of its exponent are set. Adding the lowest bit of the
//! exponent then carries into the sign, so a range is tested by one AND, one addition and one OR for each value, all of
//! integers. The compiler makes vector instructions of that on every processor, and they take less time than a crc32c.
//! Kinds without infinities have one or two patterns of bits for NaN.

use crate::dtype::Dtype;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

/// The worst value that an array holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotFinite {
    /// Positive or negative infinity.
    Infinite,
    /// Not a number.
    Nan,
}

impl NotFinite {
    /// "inf" or "nan".
    pub fn name(self) -> &'static str {
        match self {
            Self::Infinite => "inf",
            Self::Nan => "nan",
        }
    }
}

/// How the values of a dtype are tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Test {
    /// By the bits of the exponent; for `F8_E4M3`, which has no infinity, by all bits but the sign.
    Exponent8(u8),
    Exponent16(u16),
    Exponent32(u32),
    Exponent64(u64),
    /// One byte is NaN, and all others are finite.
    Byte(u8),
}

impl Test {
    /// `None`: every value of the dtype is finite.
    fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F64 => Some(Self::Exponent64(0x7ff0_0000_0000_0000)),
            Dtype::F32 | Dtype::C64 => Some(Self::Exponent32(0x7f80_0000)),
            Dtype::F16 => Some(Self::Exponent16(0x7c00)),
            Dtype::Bf16 => Some(Self::Exponent16(0x7f80)),
            Dtype::F8E5M2 => Some(Self::Exponent8(0x7c)),
            Dtype::F8E4M3 => Some(Self::Exponent8(0x7f)),
            Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz => Some(Self::Byte(0x80)),
            Dtype::F8E8M0 => Some(Self::Byte(0xff)),
            Dtype::F4
            | Dtype::F6E2M3
            | Dtype::F6E3M2
            | Dtype::Bool
            | Dtype::U8
            | Dtype::I8
            | Dtype::I16
            | Dtype::U16
            | Dtype::I32
            | Dtype::U32
            | Dtype::I64
            | Dtype::U64 => None,
        }
    }

    /// Bytes of a value.
    fn size(self) -> usize {
        match self {
            Self::Exponent8(_) | Self::Byte(_) => 1,
            Self::Exponent16(_) => 2,
            Self::Exponent32(_) => 4,
            Self::Exponent64(_) => 8,
        }
    }

    /// The worst value in complete values; `None`: all are finite.
    fn look(self, bytes: &[u8]) -> Option<NotFinite> {
        match self {
            Self::Exponent8(exponent) => look8(bytes, exponent),
            Self::Exponent16(exponent) => look16(bytes, exponent),
            Self::Exponent32(exponent) => look32(bytes, exponent),
            Self::Exponent64(exponent) => look64(bytes, exponent),
            Self::Byte(nan) => {
                let found = bytes
                    .iter()
                    .fold(0, |found, byte| found | u8::from(*byte == nan));
                (found != 0).then_some(NotFinite::Nan)
            }
        }
    }
}

macro_rules! look {
    ($name:ident, $int:ty) => {
        fn $name(bytes: &[u8], exponent: $int) -> Option<NotFinite> {
            const SIGN: $int = 1 << (<$int>::BITS - 1);
            let lowest = exponent & exponent.wrapping_neg();
            let values = || {
                let (values, _) = bytes.as_chunks::<{ size_of::<$int>() }>();
                values.iter().map(|value| <$int>::from_le_bytes(*value))
            };
            let carries = values().fold(0, |all: $int, value| {
                all | (value & exponent).wrapping_add(lowest)
            });
            if carries & SIGN == 0 {
                return None;
            }
            // Rare: which of both is looked for among all values again.
            let has_nan = if exponent | SIGN == <$int>::MAX {
                true
            } else {
                values().any(|value| value & !SIGN > exponent)
            };
            Some(if has_nan {
                NotFinite::Nan
            } else {
                NotFinite::Infinite
            })
        }
    };
}

look!(look8, u8);
look!(look16, u16);
look!(look32, u32);
look!(look64, u64);

/// Finds the values that are not finite in the arrays of one file, which is given in pieces, in any order and by
/// several threads.
#[derive(Debug, Default)]
pub(crate) struct Finder {
    /// In the order of the file.
    spans: Vec<Span>,
    /// Values of which a part was in one piece, by span and number.
    split: Mutex<BTreeMap<(usize, u64), Split>>,
}

/// The bytes of a value, and how many of them are known.
type Split = ([u8; 8], usize);

/// An array of floats in a file.
#[derive(Debug)]
struct Span {
    /// Its number among the arrays that were given.
    number: usize,
    start: u64,
    end: u64,
    test: Test,
    /// 0: all values are finite so far, 1: one is infinite, 2: one is NaN.
    found: AtomicU8,
}

impl Finder {
    /// Args:
    ///     `arrays`: dtype, first byte in the file and bytes of each array, in the order of the file.
    pub(crate) fn new(arrays: impl Iterator<Item = (Dtype, u64, u64)>) -> Self {
        let spans = arrays
            .enumerate()
            .filter_map(|(number, (dtype, start, n_bytes))| {
                let test = Test::of(dtype)?;
                (n_bytes > 0).then(|| Span {
                    number,
                    start,
                    end: start + n_bytes,
                    test,
                    found: AtomicU8::new(0),
                })
            });
        Self {
            spans: spans.collect(),
            split: Mutex::default(),
        }
    }

    /// Looks at the bytes of the file from `at` on. Every byte is given once.
    pub(crate) fn look(&self, at: u64, bytes: &[u8]) {
        let end = at + bytes.len() as u64;
        let first = self.spans.partition_point(|span| span.end <= at);
        for (i, span) in self.spans.iter().enumerate().skip(first) {
            if span.start >= end {
                break;
            }
            let (from, to) = (span.start.max(at), span.end.min(end));
            self.look_at(
                i,
                from - span.start,
                &bytes[(from - at) as usize..(to - at) as usize],
            );
        }
    }

    /// Looks at the bytes of an array from `at` on.
    fn look_at(&self, i: usize, at: u64, bytes: &[u8]) {
        let span = &self.spans[i];
        if span.found.load(Ordering::Relaxed) == 2 {
            return;
        }
        let size = span.test.size();
        let before = (at % size as u64) as usize;
        let head = ((size - before) % size).min(bytes.len());
        let (head, bytes) = bytes.split_at(head);
        self.add_part(i, at, head);
        let (bytes, tail) = bytes.split_at(bytes.len() / size * size);
        span.add(span.test.look(bytes));
        self.add_part(i, at + (head.len() + bytes.len()) as u64, tail);
    }

    /// Adds a part of a value; looks at the value when it is complete.
    fn add_part(&self, i: usize, at: u64, part: &[u8]) {
        if part.is_empty() {
            return;
        }
        let span = &self.spans[i];
        let size = span.test.size();
        let (value, from) = (at / size as u64, (at % size as u64) as usize);
        let mut split = self.split.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, n_known) = split.entry((i, value)).or_default();
        bytes[from..from + part.len()].copy_from_slice(part);
        *n_known += part.len();
        if *n_known == size {
            span.add(span.test.look(&bytes[..size]));
            split.remove(&(i, value));
        }
    }

    /// The arrays that are not finite: their numbers, ascending, and their worst values.
    pub(crate) fn found(&self) -> Vec<(usize, NotFinite)> {
        let found = self.spans.iter().filter_map(|span| {
            let worst = match span.found.load(Ordering::Relaxed) {
                0 => return None,
                1 => NotFinite::Infinite,
                _ => NotFinite::Nan,
            };
            Some((span.number, worst))
        });
        found.collect()
    }
}

impl Span {
    fn add(&self, worst: Option<NotFinite>) {
        if let Some(worst) = worst {
            self.found.fetch_max(worst as u8 + 1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a float by its parts, as the definition of its format says.
    fn worst_of(bits: u64, n_exponent: u32, n_mantissa: u32) -> Option<NotFinite> {
        let exponent = bits >> n_mantissa & ((1 << n_exponent) - 1);
        if exponent != (1 << n_exponent) - 1 {
            return None;
        }
        let is_infinite = bits & ((1 << n_mantissa) - 1) == 0;
        Some(if is_infinite {
            NotFinite::Infinite
        } else {
            NotFinite::Nan
        })
    }

    #[test]
    fn every_value_of_16_bits_is_classified() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_le_bytes();
            let of = |dtype| Test::of(dtype).unwrap().look(&bytes);
            assert_eq!(of(Dtype::F16), worst_of(bits.into(), 5, 10), "{bits:x}");
            assert_eq!(of(Dtype::Bf16), worst_of(bits.into(), 8, 7), "{bits:x}");
        }
    }

    #[test]
    fn every_value_of_8_bits_is_classified() {
        for bits in 0..=u8::MAX {
            let of = |dtype| Test::of(dtype).unwrap().look(&[bits]);
            let nan_if = |is_nan: bool| is_nan.then_some(NotFinite::Nan);
            assert_eq!(of(Dtype::F8E5M2), worst_of(bits.into(), 5, 2), "{bits:x}");
            assert_eq!(of(Dtype::F8E4M3), nan_if(bits & 0x7f == 0x7f), "{bits:x}");
            assert_eq!(of(Dtype::F8E4M3Fnuz), nan_if(bits == 0x80), "{bits:x}");
            assert_eq!(of(Dtype::F8E5M2Fnuz), nan_if(bits == 0x80), "{bits:x}");
            assert_eq!(of(Dtype::F8E8M0), nan_if(bits == 0xff), "{bits:x}");
        }
    }

    #[test]
    fn a_value_is_found_wherever_the_file_is_cut() {
        // Two arrays that begin at odd bytes, and bytes around them that would be NaN.
        for (value, worst) in [
            (f64::NAN, Some(NotFinite::Nan)),
            (f64::NEG_INFINITY, Some(NotFinite::Infinite)),
            (f64::MAX, None),
        ] {
            for place in 0..4 {
                let mut file = vec![0xff_u8; 3];
                for i in 0..4 {
                    let one = if i == place { value } else { 1.0 };
                    file.extend(one.to_le_bytes());
                }
                file.extend([0xff; 2]);
                file.extend((value as f32).to_le_bytes());
                file.extend([0xff; 5]);
                for cut in 1..file.len() {
                    let arrays = [(Dtype::F64, 3, 32), (Dtype::U8, 35, 2), (Dtype::F32, 37, 4)];
                    let finder = Finder::new(arrays.into_iter());
                    for (i, piece) in file
                        .chunks(cut)
                        .enumerate()
                        .collect::<Vec<_>>()
                        .iter()
                        .rev()
                    {
                        finder.look((i * cut) as u64, piece);
                    }
                    let narrow = (value >= f64::MAX).then_some(NotFinite::Infinite);
                    let expected: Vec<_> = [(0, worst), (2, worst.or(narrow))]
                        .into_iter()
                        .filter_map(|(number, worst)| worst.map(|worst| (number, worst)))
                        .collect();
                    assert_eq!(
                        finder.found(),
                        expected,
                        "{value} at {place}, pieces of {cut}"
                    );
                }
            }
        }
    }
}
