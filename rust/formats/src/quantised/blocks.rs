//! The blocks of GGUF files: the values that share scales, and how they follow from the bytes.
//!
//! Every operation is one of `f32`, in the order of `gguf.quants.dequantize`, so that the results are the same bits.

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
    /// 256 values of 4 bits, with 8 scales and offsets of 6 bits.
    Q4K,
    /// 256 values of 5 bits, with 8 scales and offsets of 6 bits.
    Q5K,
    /// 256 values of 6 bits, with 16 scales of 8 bits.
    Q6K,
}

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
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            _ => return None,
        })
    }

    /// Values of a block.
    pub(super) fn n_values(self) -> usize {
        match self {
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
            _ => 32,
        }
    }

    /// Bytes of a block.
    pub(super) fn n_bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
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
