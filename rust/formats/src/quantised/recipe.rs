//! How the values of a quantised weight follow from its parts.
//!
//! Every value is computed in `f32`, and rounded once if another dtype is requested. A recipe fills a *tile*: complete rows
//! of a matrix of the weight, or a part of one row.

use super::blocks::{Block, MOST_VALUES};
use super::numbers::{E2M1, E4M3, E5M2, Number, as_f32, put_all};
use super::part::Part;
use super::quantise;
use reshard_core::dtype::Dtype;
use reshard_core::index::Index;
use reshard_core::{Error, Kind, Result};
use std::ops::Range;

/// The position of each of 8 columns in the 32 bits that AWQ packs them into.
const AWQ_ORDER: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// How values are computed.
#[derive(Debug, Clone, PartialEq)]
pub enum Recipe {
    /// Parts: 8-bit values and scales, both as `[matrices, rows, columns]`, and zero points as the scales or none. A value
    /// is multiplied by the scale of its block, and then by `factor`.
    Scaled {
        /// Rows and columns that share a scale.
        block: [u64; 2],
        /// A constant of the library.
        factor: f32,
    },
    /// Parts: pairs of E2M1 values, scales as `[matrices, rows, blocks]`, and a global scale or none. The scale is divided
    /// by the global scale, or multiplied by it.
    E2m1 {
        /// Values that share a scale.
        block: u64,
        /// Whether the global scale divides.
        divides: bool,
        /// Whether the code of -0 is +0, as in modelopt.
        positive: bool,
    },
    /// Parts: pairs of E2M1 values as `[matrices, rows, blocks, 16]`, and exponents. The matrices are transposed.
    Transposed,
    /// Parts: pairs of codes, the larger four bits first, scales, a table of 16 values; and if the scales are codes, too,
    /// their table of 256 values and their scales.
    Table {
        /// Values that share a scale.
        block: u64,
        /// Scales that share a scale, if scales are codes.
        nested: Option<u64>,
        /// What is added to a scale that is a code.
        offset: f32,
        /// Whether code 8 is a negative zero, as the kernels of bitsandbytes have it for `fp4`, whatever the table has.
        signed: bool,
    },
    /// Parts: codes of GPTQ as `[packed inputs, outputs]`, zero points, scales, and the group of each input.
    Gptq {
        /// Bits of a code.
        bits: u32,
        /// What is added to a stored zero point.
        zero: i32,
    },
    /// Parts: codes of AWQ as `[inputs, packed outputs]`, zero points, and scales.
    Awq {
        /// Inputs that share a scale.
        group: u64,
    },
    /// Part: a tensor as `[matrices, rows, columns]`. The values are codes of E4M3, scaled by the largest one of a block.
    Codes {
        /// Rows and columns that share a scale.
        block: [u64; 2],
    },
    /// Part: as of `Codes`. The values are the scales that belong to these codes.
    Scales {
        /// Rows and columns that share a scale.
        block: [u64; 2],
    },
    /// Parts: integers packed along the rows, scales as `[rows, groups]` or one for all rows, and zero points, packed
    /// along the columns, or none.
    Packed {
        /// Bits of an integer.
        bits: u32,
        /// Columns that share a scale.
        group: u64,
    },
    /// No part: every value is this one.
    Constant {
        /// The value.
        value: f32,
    },
    /// Part: blocks of a GGUF file as `[matrices, rows, bytes]`.
    Blocks(Block),
}

/// A part of a weight: complete rows of one of its matrices, or columns of one row.
#[derive(Debug, Clone)]
pub(super) struct Tile {
    /// The number of the matrix.
    pub(super) matrix: u64,
    pub(super) rows: Range<u64>,
    pub(super) columns: Range<u64>,
}

impl Tile {
    pub(super) fn n_columns(&self) -> usize {
        (self.columns.end - self.columns.start) as usize
    }

    fn n_rows(&self) -> u64 {
        self.rows.end - self.rows.start
    }
}

/// Reads regions of parts as bytes and as numbers.
pub(super) struct Reader<'a> {
    index: &'a Index,
    parts: &'a [Part],
}

impl Reader<'_> {
    pub(super) fn part(&self, number: usize) -> Result<&Part> {
        self.parts
            .get(number)
            .ok_or_else(|| Error::new(Kind::Argument, "a quantised weight has too few parts"))
    }

    /// Calls `work` with the bytes of a region.
    pub(super) fn bytes<T>(
        &self,
        number: usize,
        offset: &[u64],
        shape: &[u64],
        work: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let (mut file, mut scratch) = (None, Vec::new());
        let part = self.part(number)?;
        work(part.read(self.index, offset, shape, &mut file, &mut scratch)?)
    }

    fn numbers(&self, number: usize, offset: &[u64], shape: &[u64]) -> Result<Vec<f32>> {
        let dtype = self.part(number)?.dtype;
        let mut found = Vec::new();
        self.bytes(number, offset, shape, |bytes| {
            as_f32(dtype, bytes, &mut found)
        })?;
        Ok(found)
    }

    fn words(&self, number: usize, offset: &[u64], shape: &[u64]) -> Result<Vec<u32>> {
        self.bytes(number, offset, shape, |bytes| {
            let words = bytes.as_chunks().0.iter();
            Ok(words.map(|word| u32::from_le_bytes(*word)).collect())
        })
    }
}

impl Recipe {
    /// Rows that are filled together, at least: those that share bytes of the parts.
    pub(super) fn n_rows(&self) -> u64 {
        match self {
            Self::Transposed => 32,
            Self::Gptq { .. } | Self::Awq { .. } => 64,
            Self::Codes { block } => block[0],
            _ => 1,
        }
    }

    /// Fills a tile; `to` has its size.
    ///
    /// # Errors
    /// A part cannot be read, or is too small.
    pub(super) fn fill<O: Number>(
        &self,
        index: &Index,
        parts: &[Part],
        tile: &Tile,
        to: &mut [u8],
    ) -> Result<()> {
        let reader = Reader { index, parts };
        match *self {
            Self::Scaled { block, factor } => scaled::<O>(&reader, block, factor, tile, to),
            Self::E2m1 {
                block,
                divides,
                positive,
            } => e2m1::<O>(&reader, block, divides, positive, tile, to),
            Self::Transposed => transposed::<O>(&reader, tile, to),
            Self::Table {
                block,
                nested,
                offset,
                signed,
            } => table::<O>(&reader, (block, nested, offset), signed, tile, to),
            Self::Gptq { bits, zero } => gptq::<O>(&reader, bits, zero, tile, to),
            Self::Awq { group } => awq::<O>(&reader, group, tile, to),
            Self::Packed { bits, group } => packed::<O>(&reader, bits, group, tile, to),
            Self::Blocks(block) => blocks::<O>(&reader, block, tile, to),
            Self::Constant { value } => {
                put_all::<O>(std::iter::repeat_n(value, to.len() / O::N_BYTES), to);
                Ok(())
            }
            Self::Codes { block } => quantise::codes::<O>(&reader, block, tile, to),
            Self::Scales { block } => quantise::scales::<O>(&reader, block, tile, to),
        }
    }
}

fn scaled<O: Number>(
    reader: &Reader<'_>,
    block: [u64; 2],
    factor: f32,
    tile: &Tile,
    to: &mut [u8],
) -> Result<()> {
    let grid = Grid::of(reader.part(1)?, block, tile);
    let scales = reader.numbers(1, &grid.offset, &grid.shape)?;
    let zeros: Vec<i8> = match reader.parts.get(2) {
        None => Vec::new(),
        Some(_) => reader.bytes(2, &grid.offset, &grid.shape, |bytes| {
            Ok(bytes.iter().map(|b| b.cast_signed()).collect())
        })?,
    };
    let offset = [tile.matrix, tile.rows.start, tile.columns.start];
    let shape = [1, tile.n_rows(), tile.n_columns() as u64];
    let dtype = reader.part(0)?.dtype;
    reader.bytes(0, &offset, &shape, |codes| {
        let rows = codes.chunks_exact(tile.n_columns());
        let rows = rows.zip(to.chunks_exact_mut(tile.n_columns() * O::N_BYTES));
        for (row, (codes, to)) in tile.rows.clone().zip(rows) {
            for (at, columns) in grid.segments(row, block, tile) {
                let (codes, to) = (
                    &codes[columns.clone()],
                    &mut to[columns.start * O::N_BYTES..columns.end * O::N_BYTES],
                );
                let scale = scales[at];
                match dtype {
                    Dtype::F8E4M3 => {
                        put_all::<O>(
                            codes.iter().map(|code| E4M3[usize::from(*code)] * scale),
                            to,
                        );
                    }
                    Dtype::F8E5M2 => {
                        put_all::<O>(
                            codes.iter().map(|code| E5M2[usize::from(*code)] * scale),
                            to,
                        );
                    }
                    Dtype::I8 => {
                        let zero = i16::from(zeros.get(at).copied().unwrap_or(0));
                        let value = |code: &u8| f32::from(i16::from(code.cast_signed()) - zero);
                        put_all::<O>(codes.iter().map(|code| value(code) * scale * factor), to);
                    }
                    other => {
                        let message = format!("{other} is no dtype of scaled values");
                        return Err(Error::new(Kind::Unsupported, message));
                    }
                }
            }
        }
        Ok(())
    })
}

/// The scales of a tile.
struct Grid {
    offset: [u64; 3],
    shape: [u64; 3],
}

impl Grid {
    fn of(part: &Part, block: [u64; 2], tile: &Tile) -> Self {
        let first = [tile.rows.start / block[0], tile.columns.start / block[1]];
        let end = [
            tile.rows.end.div_ceil(block[0]),
            tile.columns.end.div_ceil(block[1]),
        ];
        // One scale may stand for all matrices.
        let matrix = tile
            .matrix
            .min(part.shape.first().map_or(0, |n| n.saturating_sub(1)));
        Self {
            offset: [matrix, first[0], first[1]],
            shape: [1, end[0] - first[0], end[1] - first[1]],
        }
    }

    /// For a row, the number of each scale, and the columns of the tile that have it.
    fn segments(
        &self,
        row: u64,
        block: [u64; 2],
        tile: &Tile,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let columns = tile.columns.clone();
        let first = ((row / block[0] - self.offset[1]) * self.shape[2]) as usize;
        (0..self.shape[2]).map(move |i| {
            let from = ((self.offset[2] + i) * block[1]).max(columns.start) - columns.start;
            let until = ((self.offset[2] + i + 1) * block[1]).min(columns.end) - columns.start;
            (first + i as usize, from as usize..until as usize)
        })
    }
}

fn e2m1<O: Number>(
    reader: &Reader<'_>,
    block: u64,
    divides: bool,
    positive: bool,
    tile: &Tile,
    to: &mut [u8],
) -> Result<()> {
    let block = [1, block];
    let mut of_code = E2M1;
    if positive {
        of_code[8] = 0.0;
    }
    let grid = Grid::of(reader.part(1)?, block, tile);
    let mut scales = reader.numbers(1, &grid.offset, &grid.shape)?;
    if let Some(part) = reader.parts.get(2) {
        let matrix = tile
            .matrix
            .min(part.shape.first().map_or(0, |n| n.saturating_sub(1)));
        let global = reader.numbers(2, &[matrix], &[1])?;
        for scale in &mut scales {
            *scale = if divides {
                *scale / global[0]
            } else {
                *scale * global[0]
            };
        }
    }
    let (first, end) = (tile.columns.start / 2, tile.columns.end.div_ceil(2));
    let odd = (tile.columns.start % 2) as usize;
    let (offset, shape) = (
        [tile.matrix, tile.rows.start, first],
        [1, tile.n_rows(), end - first],
    );
    reader.bytes(0, &offset, &shape, |pairs| {
        let rows = pairs.chunks_exact((end - first) as usize);
        let rows = rows.zip(to.chunks_exact_mut(tile.n_columns() * O::N_BYTES));
        for (row, (pairs, to)) in tile.rows.clone().zip(rows) {
            for (at, columns) in grid.segments(row, block, tile) {
                let to = &mut to[columns.start * O::N_BYTES..columns.end * O::N_BYTES];
                let scale = scales[at];
                let values = columns.map(|column| {
                    let at = column + odd;
                    of_code[usize::from(pairs[at / 2] >> (4 * (at % 2)) & 15)] * scale
                });
                put_all::<O>(values, to);
            }
        }
        Ok(())
    })
}

fn transposed<O: Number>(reader: &Reader<'_>, tile: &Tile, to: &mut [u8]) -> Result<()> {
    let (first, end) = (tile.rows.start / 32, tile.rows.end.div_ceil(32));
    let (n, n_blocks) = (tile.n_columns(), (end - first) as usize);
    let offset = [tile.matrix, tile.columns.start, first];
    let scales = reader.numbers(1, &offset, &[1, n as u64, end - first])?;
    let offset = [tile.matrix, tile.columns.start, first, 0];
    reader.bytes(0, &offset, &[1, n as u64, end - first, 16], |pairs| {
        let rows = to.chunks_exact_mut(n * O::N_BYTES);
        for (row, to) in tile.rows.clone().zip(rows) {
            let block = (row / 32 - first) as usize;
            let (byte, shift) = ((row % 32 / 2) as usize, 4 * (row % 2));
            let values = (0..n).map(|column| {
                let at = column * n_blocks + block;
                E2M1[usize::from(pairs[at * 16 + byte] >> shift & 15)] * scales[at]
            });
            put_all::<O>(values, to);
        }
        Ok(())
    })
}

fn table<O: Number>(
    reader: &Reader<'_>,
    (block, nested, offset): (u64, Option<u64>, f32),
    signed: bool,
    tile: &Tile,
    to: &mut [u8],
) -> Result<()> {
    // The values are one row for the parts, whatever the shape of the weight.
    let (start, end) = (tile.columns.start, tile.columns.end);
    let mut values = reader.numbers(2, &[0], &[16])?;
    if signed {
        values[8] = -0.0;
    }
    let (first, n) = (start / block, end.div_ceil(block) - start / block);
    let scales = if let Some(nested) = nested {
        let of_codes = reader.numbers(3, &[0], &[256])?;
        let (from, until) = (first / nested, (first + n).div_ceil(nested));
        let second = reader.numbers(4, &[from], &[until - from])?;
        reader.bytes(1, &[first], &[n], |codes| {
            let numbers = (first..).zip(codes);
            let scale = |(at, code): (u64, &u8)| {
                of_codes[usize::from(*code)] * second[(at / nested - from) as usize] + offset
            };
            Ok(numbers.map(scale).collect())
        })?
    } else {
        reader.numbers(1, &[first], &[n])?
    };
    // bitsandbytes can store the bytes as elements of another dtype, so that FSDP divides them as it divides others.
    let unit = reader.part(0)?.dtype.unit().1;
    let (at, until) = (start / 2 / unit, end.div_ceil(2).div_ceil(unit));
    let byte = at * unit;
    reader.bytes(0, &[at], &[until - at], |pairs| {
        let numbers = (start..end).map(|at| {
            let shift = 4 * (1 - at % 2);
            let code = pairs[(at / 2 - byte) as usize] >> shift & 15;
            values[usize::from(code)] * scales[(at / block - first) as usize]
        });
        put_all::<O>(numbers, to);
        Ok(())
    })
}

fn gptq<O: Number>(
    reader: &Reader<'_>,
    bits: u32,
    zero: i32,
    tile: &Tile,
    to: &mut [u8],
) -> Result<()> {
    let wide = u64::from(bits);
    let (first, end) = (
        tile.columns.start * wide / 32,
        (tile.columns.end * wide).div_ceil(32),
    );
    let n = tile.n_rows();
    let codes = reader.words(0, &[first, tile.rows.start], &[end - first, n])?;
    let n_groups = reader.part(2)?.shape[0];
    let scales = reader.numbers(2, &[0, tile.rows.start], &[n_groups, n])?;
    let (low, high) = (
        tile.rows.start * wide / 32,
        (tile.rows.end * wide).div_ceil(32),
    );
    let zeros = reader.words(1, &[0, low], &[n_groups, high - low])?;
    let order = reader.words(3, &[tile.columns.start], &[tile.n_columns() as u64])?;
    if let Some(group) = order.iter().find(|group| u64::from(**group) >= n_groups) {
        let key = &reader.part(3)?.key;
        let (role, weight) = key.split_once(' ').unwrap_or(("g_idx", key));
        let message =
            format!("`{role}` of `{weight}` names group {group}; expected less than {n_groups}");
        return Err(Error::damaged(message));
    }
    let code = |words: &[u32], step: usize, start: usize, at: u64, base: u64| {
        code_of(bits, words, step, start, at, base)
    };
    let mut of_group = vec![(0.0, 0); n_groups as usize];
    let rows = to.chunks_exact_mut(tile.n_columns() * O::N_BYTES);
    for (row, (at, to)) in tile.rows.clone().zip(rows.enumerate()) {
        for (group, of) in of_group.iter_mut().enumerate() {
            let start = group * (high - low) as usize;
            let stored = code(&zeros, 1, start, row, low).cast_signed();
            *of = (scales[group * n as usize + at], stored + zero);
        }
        let columns = tile.columns.clone().zip(&order);
        let values = columns.map(|(column, group)| {
            let (scale, zero) = of_group[*group as usize];
            let value = code(&codes, n as usize, at, column, first).cast_signed() - zero;
            f32::from(value as i16) * scale
        });
        put_all::<O>(values, to);
    }
    Ok(())
}

fn awq<O: Number>(reader: &Reader<'_>, group: u64, tile: &Tile, to: &mut [u8]) -> Result<()> {
    let (first, end) = (tile.rows.start / 8, tile.rows.end.div_ceil(8));
    let wide = (end - first) as usize;
    let shape = [tile.n_columns() as u64, end - first];
    let codes = reader.words(0, &[tile.columns.start, first], &shape)?;
    let (from, until) = (tile.columns.start / group, tile.columns.end.div_ceil(group));
    let zeros = reader.words(1, &[from, first], &[until - from, end - first])?;
    let n = tile.n_rows();
    let scales = reader.numbers(2, &[from, tile.rows.start], &[until - from, n])?;
    let rows = to.chunks_exact_mut(tile.n_columns() * O::N_BYTES);
    for (row, (at, to)) in tile.rows.clone().zip(rows.enumerate()) {
        let (word, shift) = (
            (row / 8 - first) as usize,
            4 * AWQ_ORDER[(row % 8) as usize],
        );
        let code =
            |words: &[u32], line: usize| f32::from((words[line * wide + word] >> shift & 15) as u8);
        let values = tile.columns.clone().enumerate().map(|(line, column)| {
            let group = (column / group - from) as usize;
            (code(&codes, line) - code(&zeros, group)) * scales[group * n as usize + at]
        });
        put_all::<O>(values, to);
    }
    Ok(())
}

/// The code at a place of a sequence of codes, also where its bits begin in one word and end in the next one.
///
/// Args:
///     `step`: from one word of the sequence to the next one.
///     `start`: the first word.
///     `base`: the place of the first word in all words of the sequence.
#[inline]
fn code_of(bits: u32, words: &[u32], step: usize, start: usize, at: u64, base: u64) -> u32 {
    let (word, shift) = at_bit(at, bits);
    let word = start + (word - base) as usize * step;
    let low = words[word] >> shift;
    let all = if shift + bits > 32 {
        low | words[word + step] << (32 - shift)
    } else {
        low
    };
    all & (u32::MAX >> (32 - bits))
}

/// The word in which a code begins, and the bit in it.
fn at_bit(at: u64, bits: u32) -> (u64, u32) {
    let bit = at * u64::from(bits);
    (bit / 32, (bit % 32) as u32)
}

fn packed<O: Number>(
    reader: &Reader<'_>,
    bits: u32,
    group: u64,
    tile: &Tile,
    to: &mut [u8],
) -> Result<()> {
    let words_of = |range: &Range<u64>| {
        let wide = u64::from(bits);
        (range.start * wide / 32, (range.end * wide).div_ceil(32))
    };
    let (first, end) = words_of(&tile.columns);
    let n_words = (end - first) as usize;
    let codes = reader.words(0, &[tile.rows.start, first], &[tile.n_rows(), end - first])?;
    let (from, until) = (tile.columns.start / group, tile.columns.end.div_ceil(group));
    let n_groups = (until - from) as usize;
    let is_one = reader.part(1)?.shape[0] == 1;
    let (row, n_rows) = if is_one {
        (0, 1)
    } else {
        (tile.rows.start, tile.n_rows())
    };
    let scales = reader.numbers(1, &[row, from], &[n_rows, until - from])?;
    let (low, high) = words_of(&tile.rows);
    let zeros = match reader.parts.get(2) {
        None => None,
        Some(_) => Some(reader.words(2, &[low, from], &[high - low, until - from])?),
    };
    let half = 1_u32 << (bits - 1);
    let rows = to.chunks_exact_mut(tile.n_columns() * O::N_BYTES);
    for (at, (row, to)) in tile.rows.clone().zip(rows).enumerate() {
        let values = tile.columns.clone().map(|column| {
            let of_row = (column / group - from) as usize;
            let zero = zeros.as_ref().map_or(half, |words| {
                code_of(bits, words, n_groups, of_row, row, low)
            });
            let code = code_of(bits, &codes, 1, at * n_words, column, first);
            let scale = scales[if is_one {
                of_row
            } else {
                at * n_groups + of_row
            }];
            f32::from(code as i16 - zero as i16) * scale
        });
        put_all::<O>(values, to);
    }
    Ok(())
}

fn blocks<O: Number>(reader: &Reader<'_>, block: Block, tile: &Tile, to: &mut [u8]) -> Result<()> {
    let (n, n_bytes) = (block.n_values() as u64, block.n_bytes() as u64);
    let (first, end) = (tile.columns.start / n, tile.columns.end.div_ceil(n));
    let skipped = (tile.columns.start % n) as usize;
    let offset = [tile.matrix, tile.rows.start, first * n_bytes];
    let shape = [1, tile.n_rows(), (end - first) * n_bytes];
    let mut values = [0.0; MOST_VALUES];
    reader.bytes(0, &offset, &shape, |bytes| {
        let rows = bytes.chunks_exact(shape[2] as usize);
        for (row, mut to) in rows.zip(to.chunks_exact_mut(tile.n_columns() * O::N_BYTES)) {
            let mut skipped = skipped;
            for bytes in row.chunks_exact(block.n_bytes()) {
                block.decode(bytes, &mut values);
                let values = &values[skipped..block.n_values()];
                let n_bytes = (values.len() * O::N_BYTES).min(to.len());
                let (own, after) = to.split_at_mut(n_bytes);
                put_all::<O>(values.iter().copied(), own);
                (to, skipped) = (after, 0);
            }
        }
        Ok(())
    })
}
