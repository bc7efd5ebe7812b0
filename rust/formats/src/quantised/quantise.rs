//! Block-scaled FP8 from ordinary tensors: the codes, and the scales of the blocks.
//!
//! The rule is that of transformers, `Fp8Quantize`, in `f32`: with `m` the largest magnitude of a block, a value is
//! multiplied by `1 / m * 448`, clamped and rounded to nearest even, and the stored scale is the reciprocal of that. A block of zeros,
//! and one with a NaN, has the scale 1.

use super::numbers::{Number, as_f32};
use super::recipe::{Reader, Tile};
use reshard_core::Result;

/// The largest number of E4M3.
const LARGEST: f32 = 448.0;

/// A code of E4M3.
pub(super) struct Code;

impl Number for Code {
    const N_BYTES: usize = 1;
    #[inline]
    fn put(value: f32, to: &mut [u8]) {
        to[0] = code_of(value);
    }
}

/// The nearest number of E4M3 to a value, by its code; of two the even one.
#[inline]
fn code_of(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24 & 0x80) as u8;
    if value.is_nan() {
        return sign | 0x7f;
    }
    let value = value.abs().min(LARGEST);
    let bits = value.to_bits();
    let magnitude = if value < 0.015_625 {
        // The sum has the steps of subnormal numbers.
        (value + 16384.0).to_bits() - 16384_f32.to_bits()
    } else {
        ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)
    };
    sign | magnitude as u8
}

/// What the values of a block are multiplied by, and what is stored.
fn scale_of(largest: f32) -> (f32, f32) {
    if largest > 0.0 {
        // torch divides a number by a tensor so.
        let scale = (1.0 / largest) * LARGEST;
        (scale, 1.0 / scale)
    } else {
        (1.0, 1.0)
    }
}

/// The largest magnitudes of blocks: those of rows `first..end` of blocks, and of the blocks of some columns.
fn largest(
    reader: &Reader<'_>,
    block: [u64; 2],
    matrix: u64,
    rows: std::ops::Range<u64>,
    columns: std::ops::Range<u64>,
) -> Result<Vec<f32>> {
    let part = reader.part(0)?;
    let (n_rows, n_columns) = (part.shape[1], part.shape[2]);
    let (from, until) = (
        columns.start * block[1],
        (columns.end * block[1]).min(n_columns),
    );
    let n = (columns.end - columns.start) as usize;
    let mut found = vec![0_f32; (rows.end - rows.start) as usize * n];
    let (dtype, width) = (part.dtype, (until - from) as usize);
    let mut values = Vec::new();
    for (of_blocks, row) in found.chunks_exact_mut(n).zip(rows) {
        let (begin, end) = (row * block[0], ((row + 1) * block[0]).min(n_rows));
        let (offset, shape) = ([matrix, begin, from], [1, end - begin, until - from]);
        reader.bytes(0, &offset, &shape, |bytes| {
            for line in bytes.chunks_exact(width * dtype.unit().1 as usize) {
                as_f32(dtype, line, &mut values)?;
                for (largest, of_block) in
                    of_blocks.iter_mut().zip(values.chunks(block[1] as usize))
                {
                    let bits = of_block.iter().map(|value| value.to_bits() & 0x7fff_ffff);
                    // The order of magnitudes is that of their bits, with NaN behind infinity.
                    let bits = bits.fold(largest.to_bits(), u32::max);
                    *largest = f32::from_bits(bits);
                }
            }
            Ok(())
        })?;
    }
    Ok(found)
}

/// The codes of a tile.
pub(super) fn codes<O: Number>(
    reader: &Reader<'_>,
    block: [u64; 2],
    tile: &Tile,
    to: &mut [u8],
) -> Result<()> {
    let rows = tile.rows.start / block[0]..tile.rows.end.div_ceil(block[0]);
    let columns = tile.columns.start / block[1]..tile.columns.end.div_ceil(block[1]);
    let n_blocks = (columns.end - columns.start) as usize;
    let (first_row, first_column) = (rows.start, columns.start);
    let found = largest(reader, block, tile.matrix, rows, columns)?;
    let scales: Vec<f32> = found.into_iter().map(|one| scale_of(one).0).collect();
    let dtype = reader.part(0)?.dtype;
    let n = tile.n_columns();
    let (offset, shape) = (
        [tile.matrix, tile.rows.start, tile.columns.start],
        [1, tile.rows.end - tile.rows.start, n as u64],
    );
    let mut values = Vec::new();
    reader.bytes(0, &offset, &shape, |bytes| {
        let lines = bytes.chunks_exact(n * dtype.unit().1 as usize);
        let lines = lines.zip(to.chunks_exact_mut(n * O::N_BYTES));
        for (row, (line, to)) in tile.rows.clone().zip(lines) {
            as_f32(dtype, line, &mut values)?;
            let of_row = &scales[(row / block[0] - first_row) as usize * n_blocks..][..n_blocks];
            let mut start = 0;
            for (number, scale) in (first_column..).zip(of_row) {
                let end = ((number + 1) * block[1]).min(tile.columns.end) - tile.columns.start;
                let end = end as usize;
                let to = &mut to[start * O::N_BYTES..end * O::N_BYTES];
                for (value, to) in values[start..end]
                    .iter()
                    .zip(to.chunks_exact_mut(O::N_BYTES))
                {
                    O::put(value * scale, to);
                }
                start = end;
            }
        }
        Ok(())
    })
}

/// The stored scales of a tile of blocks.
pub(super) fn scales<O: Number>(
    reader: &Reader<'_>,
    block: [u64; 2],
    tile: &Tile,
    to: &mut [u8],
) -> Result<()> {
    let found = largest(
        reader,
        block,
        tile.matrix,
        tile.rows.clone(),
        tile.columns.clone(),
    )?;
    for (largest, to) in found.into_iter().zip(to.chunks_exact_mut(O::N_BYTES)) {
        O::put(scale_of(largest).1, to);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::numbers::E4M3;
    use super::*;

    #[test]
    fn codes_are_the_nearest_numbers() {
        for code in 0..=0x7e_u8 {
            let value = E4M3[usize::from(code)];
            assert_eq!(code_of(value), code);
            assert_eq!(code_of(-value), code | 0x80);
            if code < 0x7e {
                let next = E4M3[usize::from(code) + 1];
                let half = f32::midpoint(value, next);
                let even = code + (code & 1);
                assert_eq!(code_of(half), even);
                assert_eq!(code_of(f32::from_bits(half.to_bits() - 1)), code);
                assert_eq!(code_of(f32::from_bits(half.to_bits() + 1)), code + 1);
            }
        }
        assert_eq!(code_of(1e9), 0x7e);
        assert_eq!(code_of(f32::NAN) & 0x7f, 0x7f);
    }
}
