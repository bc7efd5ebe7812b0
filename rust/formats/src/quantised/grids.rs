//! The blocks of GGUF files whose codes are places in a table of points: `IQ1`, `IQ2` and `IQ3`.
//!
//! The tables belong to the format. `grids.bin` holds each point as 16 bits: eight places of two bits in a list of
//! values, or four places of four bits. Signs of eight values are eight bits, or seven of which the eighth follows.

use super::blocks::MOST_VALUES;
use half::f16;

/// The points of all types, one type after the other.
static POINTS: &[u8; 9216] = include_bytes!("grids.bin");

/// The points of a type: where they begin in `POINTS`, in points.
const IQ2_XXS: usize = 0;
const IQ2_XS: usize = 256;
const IQ2_S: usize = 768;
const IQ1: usize = 1792;
const IQ3_XXS: usize = 3840;
const IQ3_S: usize = 4096;

const OF_IQ2: [f32; 4] = [8.0, 25.0, 43.0, 0.0];
const OF_IQ1: [f32; 4] = [-1.0, 0.0, 1.0, 0.0];
const OF_IQ3_XXS: [f32; 16] = values([4, 12, 20, 28, 36, 44, 52, 62]);
const OF_IQ3_S: [f32; 16] = values([1, 3, 5, 7, 9, 11, 13, 15]);
/// What is added to the points of `IQ1`, or subtracted.
const DELTA: f32 = 0.125;

const fn values(of: [u8; 8]) -> [f32; 16] {
    let mut to = [0.0; 16];
    let mut at = 0;
    while at < 8 {
        to[at] = of[at] as f32;
        at += 1;
    }
    to
}

fn point(start: usize, place: usize) -> usize {
    let at = 2 * (start + place);
    usize::from(u16::from_le_bytes([POINTS[at], POINTS[at + 1]]))
}

fn half_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The number of a type of half precision at the beginning of a block.
fn scale(bytes: &[u8]) -> f32 {
    f16::from_bits(half_at(bytes, 0)).to_f32()
}

/// A code of four bits.
fn nibble(bytes: &[u8], at: usize) -> u8 {
    bytes[at / 2] >> (4 * (at % 2)) & 15
}

/// Eight signs of the seven bits: their parity is the eighth one.
fn signs_of(bits: u32) -> u8 {
    let bits = (bits & 127) as u8;
    bits | (bits.count_ones() as u8 & 1) << 7
}

/// The eight values of a point of `IQ2`.
fn eight(to: &mut [f32], d: f32, point: usize, signs: u8) {
    for (at, value) in to.iter_mut().enumerate() {
        *value = signed(d * OF_IQ2[point >> (2 * at) & 3], signs >> at & 1);
    }
}

/// The four values of a point of `IQ3`.
fn four(to: &mut [f32], d: f32, point: usize, of: &[f32; 16], signs: u8) {
    for (at, value) in to.iter_mut().enumerate() {
        *value = signed(d * of[point >> (4 * at) & 15], signs >> at & 1);
    }
}

fn signed(value: f32, is_negative: u8) -> f32 {
    if is_negative == 1 { -value } else { value }
}

/// The eight values of a point of `IQ1`.
fn shifted(to: &mut [f32], d: f32, point: usize, delta: f32) {
    for (at, value) in to.iter_mut().enumerate() {
        *value = d * (OF_IQ1[point >> (2 * at) & 3] + delta);
    }
}

pub(super) fn iq2_xxs(bytes: &[u8], to: &mut [f32; MOST_VALUES]) {
    let d = scale(bytes);
    for (group, to) in to.chunks_exact_mut(32).enumerate() {
        let places = &bytes[2 + 8 * group..][..4];
        let rest = word_at(bytes, 6 + 8 * group);
        let d = d * (0.5 + f32::from((rest >> 28) as u8)) * 0.25;
        for (at, (to, place)) in to.chunks_exact_mut(8).zip(places).enumerate() {
            let point = point(IQ2_XXS, usize::from(*place));
            eight(to, d, point, signs_of(rest >> (7 * at)));
        }
    }
}

pub(super) fn iq2_xs(bytes: &[u8], to: &mut [f32; MOST_VALUES]) {
    let d = scale(bytes);
    for (at, to) in to.chunks_exact_mut(8).enumerate() {
        let code = half_at(bytes, 2 + 2 * at);
        let d = d * (0.5 + f32::from(nibble(&bytes[66..74], at / 2))) * 0.25;
        let point = point(IQ2_XS, usize::from(code & 511));
        eight(to, d, point, signs_of(u32::from(code >> 9)));
    }
}

pub(super) fn iq2_s(bytes: &[u8], to: &mut [f32; MOST_VALUES]) {
    let d = scale(bytes);
    for (at, to) in to.chunks_exact_mut(8).enumerate() {
        let high = usize::from(bytes[66 + at / 4] >> (2 * (at % 4)) & 3);
        let d = d * (0.5 + f32::from(nibble(&bytes[74..82], at / 2))) * 0.25;
        let point = point(IQ2_S, usize::from(bytes[2 + at]) | high << 8);
        eight(to, d, point, bytes[34 + at]);
    }
}

pub(super) fn iq3_xxs(bytes: &[u8], to: &mut [f32; MOST_VALUES]) {
    let d = scale(bytes);
    for (group, to) in to.chunks_exact_mut(32).enumerate() {
        let places = &bytes[2 + 8 * group..][..8];
        let rest = word_at(bytes, 66 + 4 * group);
        let d = d * (0.5 + f32::from((rest >> 28) as u8)) * 0.5;
        for (at, (to, place)) in to.chunks_exact_mut(4).zip(places).enumerate() {
            let signs = signs_of(rest >> (7 * (at / 2))) >> (4 * (at % 2));
            let point = point(IQ3_XXS, usize::from(*place));
            four(to, d, point, &OF_IQ3_XXS, signs);
        }
    }
}

pub(super) fn iq3_s(bytes: &[u8], to: &mut [f32; MOST_VALUES]) {
    let d = scale(bytes);
    for (at, to) in to.chunks_exact_mut(4).enumerate() {
        let high = usize::from(bytes[66 + at / 8] >> (at % 8) & 1);
        let d = d * f32::from(1 + 2 * nibble(&bytes[106..110], at / 8));
        let point = point(IQ3_S, usize::from(bytes[2 + at]) | high << 8);
        four(to, d, point, &OF_IQ3_S, nibble(&bytes[74..106], at));
    }
}

pub(super) fn iq1_s(bytes: &[u8], to: &mut [f32; MOST_VALUES]) {
    let d = scale(bytes);
    for (at, to) in to.chunks_exact_mut(8).enumerate() {
        let rest = half_at(bytes, 34 + 2 * (at / 4));
        let d = d * f32::from(2 * (rest >> 12 & 7) + 1);
        let delta = if rest & 0x8000 == 0 { DELTA } else { -DELTA };
        let high = usize::from(rest >> (3 * (at % 4)) & 7);
        shifted(
            to,
            d,
            point(IQ1, usize::from(bytes[2 + at]) | high << 8),
            delta,
        );
    }
}

/// Four bits of its scale are in each of four numbers, above their scales of three bits.
pub(super) fn iq1_m(bytes: &[u8], to: &mut [f32; MOST_VALUES]) {
    let rest = |at: usize| half_at(bytes, 48 + 2 * at);
    let bits = rest(0) >> 12 | (rest(1) & 0xf000) >> 8 | (rest(2) & 0xf000) >> 4 | rest(3) & 0xf000;
    let d = f16::from_bits(bits).to_f32();
    for (at, to) in to.chunks_exact_mut(8).enumerate() {
        let d = d * f32::from(2 * (rest(at / 8) >> (3 * (at / 2 % 4)) & 7) + 1);
        let more = nibble(&bytes[32..48], at);
        let delta = if more & 8 == 0 { DELTA } else { -DELTA };
        let place = usize::from(bytes[at]) | usize::from(more & 7) << 8;
        shifted(to, d, point(IQ1, place), delta);
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::{Block, MOST_VALUES};

    /// Blocks of random bytes are decoded, and no value is larger than its scale allows.
    fn decode_random_blocks(n: usize) {
        let largest = [
            (16, 43.0 * 3.875),
            (17, 43.0 * 3.875),
            (18, 62.0 * 7.75),
            (19, 1.125 * 15.0),
            (21, 15.0 * 31.0),
            (22, 43.0 * 3.875),
            (29, 1.125 * 15.0),
        ];
        let mut state = 1_u64;
        for run in 0..n {
            let (id, most) = largest[run % largest.len()];
            let block = Block::of_id(id).expect("a type of blocks");
            let mut bytes = vec![0; block.n_bytes()];
            for byte in &mut bytes {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                *byte = (state >> 33) as u8;
            }
            let mut to = [f32::NAN; MOST_VALUES];
            block.decode(&bytes, &mut to);
            let of_half = 65_504.0_f32; // the largest number of half precision
            let is_bad = |value: &&f32| value.is_finite() && value.abs() > of_half * most;
            assert_eq!(to.iter().find(is_bad), None);
        }
    }

    #[test]
    fn random_blocks_are_decoded() {
        decode_random_blocks(7_000);
    }

    /// `cargo test --release -p reshard-formats grids -- --ignored`
    #[test]
    #[ignore = "takes a minute"]
    fn a_million_random_blocks() {
        decode_random_blocks(1_200_000);
    }
}
