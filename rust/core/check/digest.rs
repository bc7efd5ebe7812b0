//! Digests of ranges of an array, computed from pieces of it in any order. Arrays that must agree are compared by them,
//! so that each is read once.
//!
//! A digest is a CRC-64. A CRC is linear: that of a range is the sum of those of its pieces, each multiplied by x^n for
//! the n bits behind it (modulo the polynomial; a sum is an XOR). A difference inside of 64 bits is always found, and
//! one of more bits with a probability of 1 - 2^-64.

use crate::bytes::cast::{can_cast, cast};
use crate::error::{Error, Kind, Result};
use crate::geometry::dtype::Dtype;
use crc_fast::{CrcAlgorithm, Digest};
use std::sync::atomic::{AtomicU64, Ordering};

/// The polynomial of CRC-64/NVME; the highest bit is that of x^0.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
const ONE: u64 = 1 << 63;

/// x^(2^i) for each i.
const POWERS: [u64; 64] = {
    let mut powers = [ONE >> 1; 64];
    let mut i = 1;
    while i < powers.len() {
        powers[i] = product(powers[i - 1], powers[i - 1]);
        i += 1;
    }
    powers
};

/// Values that are cast at once.
const BLOCK_VALUES: usize = 2048;

/// The product of two polynomials, modulo that of the CRC.
const fn product(a: u64, mut b: u64) -> u64 {
    let (mut bit, mut sum) = (ONE, 0);
    while bit != 0 {
        if a & bit != 0 {
            sum ^= b;
        }
        b = (b >> 1) ^ (POLYNOMIAL * (b & 1));
        bit >>= 1;
    }
    sum
}

/// A CRC multiplied by x^n for the bits of `n_bytes`.
fn shifted(mut crc: u64, n_bytes: u64) -> u64 {
    let mut n = 8 * n_bytes;
    while n != 0 {
        crc = product(crc, POWERS[n.trailing_zeros() as usize]);
        n &= n - 1;
    }
    crc
}

/// The digests of an array between some of its bytes.
#[derive(Debug)]
pub(crate) struct Digests {
    stored: Dtype,
    /// The dtype of the values that the digests are of.
    dtype: Dtype,
    /// Bytes of the array: the ends of the ranges, ascending.
    ends: Vec<u64>,
    /// By range. The first begins at the array, each other one at the end of the one before.
    sums: Vec<AtomicU64>,
}

impl Digests {
    /// Args:
    ///     `stored`: the dtype of the array.
    ///     `dtype`: to which its values are cast.
    ///     `n_bytes`: of the array.
    ///     `cuts`: bytes of the array at which ranges begin or end, in any order.
    ///
    /// # Errors
    /// Values cannot be cast, or a cut is inside a value or behind the array.
    pub(crate) fn new(stored: Dtype, dtype: Dtype, n_bytes: u64, cuts: &[u64]) -> Result<Self> {
        let unit = if stored == dtype { 1 } else { stored.unit().1 };
        if !can_cast(stored, dtype)
            || !n_bytes.is_multiple_of(unit)
            || cuts.iter().any(|cut| *cut > n_bytes || cut % unit != 0)
        {
            let message = format!(
                "an array of {n_bytes} bytes of {stored} has no digests of {dtype} between bytes {cuts:?}"
            );
            return Err(Error::new(Kind::Argument, message));
        }
        let mut ends: Vec<u64> = cuts.iter().copied().filter(|cut| *cut > 0).collect();
        ends.push(n_bytes);
        ends.sort_unstable();
        ends.dedup();
        Ok(Self {
            stored,
            dtype,
            sums: ends.iter().map(|_| AtomicU64::new(0)).collect(),
            ends,
        })
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Adds complete values from byte `at` on. Every byte is given once.
    pub(crate) fn add(&self, mut at: u64, mut bytes: &[u8]) {
        let first = self.ends.partition_point(|end| *end <= at);
        for (end, sum) in self.ends[first..].iter().zip(&self.sums[first..]) {
            if bytes.is_empty() {
                return;
            }
            let n = bytes.len().min((end - at) as usize);
            let own;
            (own, bytes) = bytes.split_at(n);
            at += n as u64;
            let crc = shifted(self.crc(own), self.cast_bytes(end - at));
            sum.fetch_xor(crc, Ordering::Relaxed);
        }
    }

    fn crc(&self, bytes: &[u8]) -> u64 {
        let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
        if self.stored == self.dtype {
            crc.update(bytes);
            return crc.finalize();
        }
        let mut block = [0; 8 * BLOCK_VALUES];
        for values in bytes.chunks(BLOCK_VALUES * self.stored.unit().1 as usize) {
            let block = &mut block[..self.cast_bytes(values.len() as u64) as usize];
            cast(self.stored, values, self.dtype, block);
            crc.update(block);
        }
        crc.finalize()
    }

    /// Bytes of a range after the cast.
    fn cast_bytes(&self, n_bytes: u64) -> u64 {
        if self.stored == self.dtype {
            n_bytes
        } else {
            n_bytes / self.stored.unit().1 * self.dtype.unit().1
        }
    }

    /// The digest of a range. `None`: it is not between two cuts.
    pub(crate) fn of(&self, start: u64, n_bytes: u64) -> Option<u64> {
        let range_of = |at| {
            let found = self.ends.binary_search(&at);
            if at == 0 {
                Some(0)
            } else {
                found.ok().map(|i| i + 1)
            }
        };
        let (first, last) = (range_of(start)?, range_of(start.checked_add(n_bytes)?)?);
        let mut crc = 0;
        let mut before = start;
        for i in first..last {
            crc = shifted(crc, self.cast_bytes(self.ends[i] - before));
            crc ^= self.sums[i].load(Ordering::Relaxed);
            before = self.ends[i];
        }
        Some(crc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The CRC of a range of values after the cast, without pieces.
    fn oracle(stored: Dtype, dtype: Dtype, bytes: &[u8]) -> u64 {
        let mut values = bytes.to_vec();
        if stored != dtype {
            values = vec![0; bytes.len() / stored.unit().1 as usize * dtype.unit().1 as usize];
            cast(stored, bytes, dtype, &mut values);
        }
        crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &values)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_digest_does_not_depend_on_the_pieces(
            (stored, dtype) in proptest::sample::select(vec![
                (Dtype::F32, Dtype::Bf16), (Dtype::F32, Dtype::F16), (Dtype::F64, Dtype::Bf16), (Dtype::Bf16, Dtype::Bf16),
                (Dtype::U8, Dtype::U8), (Dtype::F4, Dtype::F4),
            ]),
            values in proptest::collection::vec(any::<[u8; 8]>(), 1..6000),
            cuts in proptest::collection::vec(any::<u8>(), 0..6),
            pieces in proptest::collection::vec(any::<u8>(), 0..12),
            order in any::<u64>(),
        ) {
            let bytes: Vec<u8> = values.into_iter().flatten().collect();
            let n = bytes.len() as u64;
            let at = |part: u8| n / 8 * u64::from(part) / u64::from(u8::MAX) * 8;
            let cuts: Vec<u64> = cuts.into_iter().map(at).collect();
            let digests = Digests::new(stored, dtype, n, &cuts).unwrap();
            let mut pieces: Vec<u64> = pieces.into_iter().map(at).chain([0, n]).collect();
            pieces.sort_unstable();
            let mut pieces: Vec<_> = pieces.windows(2).map(|two| (two[0], two[1])).collect();
            let middle = order as usize % pieces.len();
            pieces.rotate_left(middle);
            for (from, to) in pieces {
                digests.add(from, &bytes[from as usize..to as usize]);
            }
            for from in cuts.iter().copied().chain([0]) {
                for to in cuts.iter().copied().chain([n]).filter(|to| *to > from) {
                    let range = &bytes[from as usize..to as usize];
                    prop_assert_eq!(digests.of(from, to - from), Some(oracle(stored, dtype, range)));
                }
            }
            if n > 8 && cuts.is_empty() {
                prop_assert_eq!(digests.of(8, n - 8), None);
            }
        }
    }

    #[test]
    fn cuts_inside_of_values_are_refused() {
        for (n_bytes, cuts) in [(8, vec![2]), (8, vec![12]), (6, vec![])] {
            assert!(Digests::new(Dtype::F32, Dtype::Bf16, n_bytes, &cuts).is_err());
        }
        assert!(Digests::new(Dtype::F32, Dtype::U8, 8, &[]).is_err());
        assert!(Digests::new(Dtype::F32, Dtype::F32, 8, &[2]).is_ok());
    }
}
