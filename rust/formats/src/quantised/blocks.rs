//! The blocks of GGUF files: the values that share scales, and how they follow from the bytes.
//!
//! Every operation is one of `f32`, in the order of `gguf.quants.dequantize`, so that the results are the same bits.

use super::grids;
use super::numbers::E4M3;
use half::f16;

/// A type of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Block {
    /// 32 values of 4 bits and a scale.
    Q4_0,
    /// 32 values of 4 bits, a scale and an offset.
    Q4_1,
    /// 32 values of 5 bits and a scale.
    Q5_0,
    /// 32 values of 5 bits, a scale and an offset.
    Q5_1,
    /// 32 values of 8 bits and a scale.
    Q8_0,
    /// 256 values of 2 bits, with 16 scales and offsets of 4 bits.
    Q2K,
    /// 256 values of 3 bits, with 16 scales of 6 bits.
    Q3K,
    /// 256 values of 4 bits, with 8 scales and offsets of 6 bits.
    Q4K,
    /// 256 values of 5 bits, with 8 scales and offsets of 6 bits.
    Q5K,
    /// 256 values of 6 bits, with 16 scales of 8 bits.
    Q6K,
    /// 32 groups of 8 values that are points of a table, with 8 scales of 4 bits.
    Iq2Xxs,
    /// The same with a larger table and 16 scales.
    Iq2Xs,
    /// The same with a still larger table, and a sign for each value.
    Iq2S,
    /// 64 groups of 4 values that are points of a table, with 8 scales of 4 bits.
    Iq3Xxs,
    /// The same with a larger table, and a sign for each value.
    Iq3S,
    /// 32 groups of 8 values of -1, 0 and 1 that are points of a table, with 8 scales of 3 bits and shifts.
    Iq1S,
    /// The same with 16 scales and 32 shifts.
    Iq1M,
    /// 32 places in a table of 16 values, and a scale.
    Iq4Nl,
    /// 256 places in the same table, with 8 scales of 6 bits.
    Iq4Xs,
    /// 256 values of -1, 0 and 1, of which five are a byte, and a scale.
    Tq1_0,
    /// 256 values of 2 bits and a scale.
    Tq2_0,
    /// 32 values of E2M1, and a power of two as their scale.
    Mxfp4,
    /// 64 values of E2M1, with 4 scales of E4M3.
    Nvfp4,
}

/// The values of `IQ4_NL` and `IQ4_XS`.
const IQ4: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];
/// Twice the values of E2M1. Here none of them is a negative zero.
const TWICE_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Most values of a block.
pub(super) const MOST_VALUES: usize = 256;

impl Block {
    /// The type of a number in a GGUF file.
    pub fn of_id(id: u32) -> Option<Self> {
        Some(match id {
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            16 => Self::Iq2Xxs,
            17 => Self::Iq2Xs,
            18 => Self::Iq3Xxs,
            19 => Self::Iq1S,
            20 => Self::Iq4Nl,
            21 => Self::Iq3S,
            22 => Self::Iq2S,
            23 => Self::Iq4Xs,
            29 => Self::Iq1M,
            34 => Self::Tq1_0,
            35 => Self::Tq2_0,
            39 => Self::Mxfp4,
            40 => Self::Nvfp4,
            _ => return None,
        })
    }

    /// Values of a block.
    pub(super) fn n_values(self) -> usize {
        match self {
            Self::Q4_0
            | Self::Q4_1
            | Self::Q5_0
            | Self::Q5_1
            | Self::Q8_0
            | Self::Iq4Nl
            | Self::Mxfp4 => 32,
            Self::Nvfp4 => 64,
            _ => 256,
        }
    }

    /// Bytes of a block.
    pub(super) fn n_bytes(self) -> usize {
        match self {
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K | Self::Iq3S => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Iq2Xs => 74,
            Self::Iq2S => 82,
            Self::Iq3Xxs => 98,
            Self::Iq1S => 50,
            Self::Iq1M => 56,
            Self::Iq4Xs => 136,
            Self::Tq1_0 => 54,
            Self::Tq2_0 | Self::Iq2Xxs => 66,
            Self::Mxfp4 => 17,
            Self::Nvfp4 => 36,
        }
    }

    /// Computes the values of a block, from exactly its bytes.
    pub(super) fn decode(self, bytes: &[u8], to: &mut [f32; MOST_VALUES]) {
        let number = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
        match self {
            Self::Q4_0 => {
                let codes = nibbles(&bytes[2..18]);
                fill(to, &codes, number(0), -8);
            }
            Self::Q4_1 => {
                let codes = nibbles(&bytes[4..20]);
                fill_from(to, &codes, number(0), number(2));
            }
            Self::Q5_0 => {
                let codes = with_bits(nibbles(&bytes[6..22]), &bytes[2..6]);
                fill(to, &codes, number(0), -16);
            }
            Self::Q5_1 => {
                let codes = with_bits(nibbles(&bytes[8..24]), &bytes[4..8]);
                fill_from(to, &codes, number(0), number(2));
            }
            Self::Q8_0 => {
                let d = number(0);
                for (value, code) in to.iter_mut().zip(&bytes[2..34]) {
                    *value = f32::from(code.cast_signed()) * d;
                }
            }
            Self::Q4K => k_values(&bytes[16..144], None, &bytes[..16], to),
            Self::Q5K => k_values(&bytes[48..176], Some(&bytes[16..48]), &bytes[..16], to),
            Self::Q6K => q6k(bytes, number(208), to),
            Self::Q2K => q2k(bytes, number(80), number(82), to),
            Self::Q3K => q3k(bytes, number(108), to),
            Self::Iq2Xxs => grids::iq2_xxs(bytes, to),
            Self::Iq2Xs => grids::iq2_xs(bytes, to),
            Self::Iq2S => grids::iq2_s(bytes, to),
            Self::Iq3Xxs => grids::iq3_xxs(bytes, to),
            Self::Iq3S => grids::iq3_s(bytes, to),
            Self::Iq1S => grids::iq1_s(bytes, to),
            Self::Iq1M => grids::iq1_m(bytes, to),
            Self::Iq4Nl => fill_named(to, &nibbles(&bytes[2..18]), &IQ4, number(0)),
            Self::Iq4Xs => iq4xs(bytes, number(0), to),
            Self::Tq1_0 => tq1(bytes, number(52), to),
            Self::Tq2_0 => {
                let d = number(64);
                for (group, to) in to.chunks_exact_mut(32).enumerate() {
                    for (value, code) in to.iter_mut().zip(&bytes[group / 4 * 32..]) {
                        let code = code >> (2 * (group % 4)) & 3;
                        *value = d * f32::from(code.cast_signed() - 1);
                    }
                }
            }
            Self::Mxfp4 => {
                let d = match u32::from(bytes[0]) {
                    exponent @ 0..2 => f32::from_bits(0x0020_0000 << exponent),
                    exponent => f32::from_bits((exponent - 1) << 23),
                };
                fill_named(to, &nibbles(&bytes[1..17]), &TWICE_E2M1, d);
            }
            Self::Nvfp4 => {
                for (group, to) in to[..64].chunks_exact_mut(16).enumerate() {
                    let d = match bytes[group] {
                        0x7f => 0.0,
                        0xff => 240.0, // the package reads it as the next larger code
                        code => E4M3[usize::from(code & 0x7f)] * 0.5,
                    };
                    let codes = &bytes[4 + group * 8..][..8];
                    for (nibble, to) in to.chunks_exact_mut(8).enumerate() {
                        for (value, code) in to.iter_mut().zip(codes) {
                            let code = code >> (4 * nibble) & 15;
                            *value = d * f32::from(TWICE_E2M1[usize::from(code)]);
                        }
                    }
                }
            }
        }
    }
}

/// The 32 codes of 16 bytes: the lower four bits of all, then the upper ones.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    let mut codes = [0; 32];
    for (at, byte) in bytes.iter().enumerate().take(16) {
        codes[at] = byte & 15;
        codes[at + 16] = byte >> 4;
    }
    codes
}

/// The same with a fifth bit for each code.
fn with_bits(mut codes: [u8; 32], bits: &[u8]) -> [u8; 32] {
    for (at, code) in codes.iter_mut().enumerate() {
        *code |= (bits[at / 8] >> (at % 8) & 1) << 4;
    }
    codes
}

fn fill(to: &mut [f32; MOST_VALUES], codes: &[u8; 32], d: f32, zero: i8) {
    for (value, code) in to.iter_mut().zip(codes) {
        *value = d * f32::from(code.cast_signed() + zero);
    }
}

fn fill_from(to: &mut [f32; MOST_VALUES], codes: &[u8; 32], d: f32, offset: f32) {
    for (value, code) in to.iter_mut().zip(codes) {
        *value = d * f32::from(*code) + offset;
    }
}

/// The values of `Q4_K`, and with a fifth bit of `Q5_K`. `head` has two numbers and the packed scales and offsets.
fn k_values(codes: &[u8], bits: Option<&[u8]>, head: &[u8], to: &mut [f32; MOST_VALUES]) {
    let d = f16::from_le_bytes([head[0], head[1]]).to_f32();
    let dmin = f16::from_le_bytes([head[2], head[3]]).to_f32();
    let (low, high, rest) = (&head[4..8], &head[8..12], &head[12..16]);
    for (pair, (codes, to)) in codes
        .chunks_exact(32)
        .zip(to.chunks_exact_mut(64))
        .enumerate()
    {
        for (nibble, to) in to.chunks_exact_mut(32).enumerate() {
            let group = 2 * pair + nibble;
            let at = group % 4;
            let (scale, offset) = if group < 4 {
                (low[at] & 63, high[at] & 63)
            } else {
                (
                    rest[at] & 15 | low[at] >> 2 & 0x30,
                    rest[at] >> 4 | high[at] >> 2 & 0x30,
                )
            };
            let (scale, offset) = (d * f32::from(scale), dmin * f32::from(offset));
            let shift = 4 * nibble;
            match bits {
                None => {
                    for (value, code) in to.iter_mut().zip(codes) {
                        *value = scale * f32::from(code >> shift & 15) - offset;
                    }
                }
                Some(bits) => {
                    for ((value, code), bits) in to.iter_mut().zip(codes).zip(bits) {
                        let code = code >> shift & 15 | (bits >> group & 1) << 4;
                        *value = scale * f32::from(code) - offset;
                    }
                }
            }
        }
    }
}

fn q6k(bytes: &[u8], d: f32, to: &mut [f32; MOST_VALUES]) {
    let (low, high, scales) = (&bytes[..128], &bytes[128..192], &bytes[192..208]);
    for (group, to) in to.chunks_exact_mut(32).enumerate() {
        let (half, within) = (group / 4, group % 4);
        let low = &low[half * 64 + within % 2 * 32..][..32];
        let high = &high[half * 32..][..32];
        let (of_low, of_high) = (4 * (within / 2), 2 * within);
        for (part, to) in to.chunks_exact_mut(16).enumerate() {
            let scale = d * f32::from(scales[group * 2 + part].cast_signed());
            let codes = low[part * 16..].iter().zip(&high[part * 16..]);
            for (value, (low, high)) in to.iter_mut().zip(codes) {
                let code = low >> of_low & 15 | (high >> of_high & 3) << 4;
                *value = scale * f32::from(code.cast_signed() - 32);
            }
        }
    }
}

/// Codes that are places in a table of values.
fn fill_named(to: &mut [f32], codes: &[u8; 32], table: &[i8; 16], d: f32) {
    for (value, code) in to.iter_mut().zip(codes) {
        *value = d * f32::from(table[usize::from(code & 15)]);
    }
}

fn q2k(bytes: &[u8], d: f32, dmin: f32, to: &mut [f32; MOST_VALUES]) {
    let (scales, codes) = (&bytes[..16], &bytes[16..80]);
    for (group, to) in to.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[group] & 15);
        let offset = dmin * f32::from(scales[group] >> 4);
        let shift = 2 * (group / 2 % 4);
        let codes = &codes[group / 8 * 32 + group % 2 * 16..][..16];
        for (value, code) in to.iter_mut().zip(codes) {
            *value = scale * f32::from(code >> shift & 3) - offset;
        }
    }
}

fn q3k(bytes: &[u8], d: f32, to: &mut [f32; MOST_VALUES]) {
    let (bits, codes, scales) = (&bytes[..32], &bytes[32..96], &bytes[96..108]);
    for (group, to) in to.chunks_exact_mut(16).enumerate() {
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        let scale = d * f32::from((low | high << 4).cast_signed() - 32);
        let (shift, bit) = (2 * (group / 2 % 4), group / 2);
        let codes = &codes[group / 8 * 32 + group % 2 * 16..][..16];
        let bits = &bits[group % 2 * 16..][..16];
        for (value, (code, bits)) in to.iter_mut().zip(codes.iter().zip(bits)) {
            // The third bit is 0 where 4 is subtracted.
            let code = (code >> shift & 3 | (bits >> bit & 1) << 2).cast_signed() - 4;
            *value = scale * f32::from(code);
        }
    }
}

fn iq4xs(bytes: &[u8], d: f32, to: &mut [f32; MOST_VALUES]) {
    let high = u16::from_le_bytes([bytes[2], bytes[3]]);
    for (group, to) in to.chunks_exact_mut(32).enumerate() {
        let low = bytes[4 + group / 2] >> (4 * (group % 2)) & 15;
        let high = (high >> (2 * group) & 3) as u8;
        let scale = d * f32::from((low | high << 4).cast_signed() - 32);
        fill_named(to, &nibbles(&bytes[8 + group * 16..][..16]), &IQ4, scale);
    }
}

fn tq1(bytes: &[u8], d: f32, to: &mut [f32; MOST_VALUES]) {
    let mut at = 0;
    // The first digits of 32 bytes, their second ones, and so on; then those of 16 and of 4 bytes.
    for (bytes, n_digits) in [(&bytes[..32], 5), (&bytes[32..48], 5), (&bytes[48..52], 4)] {
        for digit in 0..n_digits {
            for byte in bytes {
                let code = (u16::from(byte.wrapping_mul([1, 3, 9, 27, 81][digit])) * 3) >> 8;
                to[at] = d * f32::from(code as i8 - 1);
                at += 1;
            }
        }
    }
}
