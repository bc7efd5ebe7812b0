//! Casts between floating-point dtypes, rounding to nearest even.

use crate::bytes::memory::{Vectorised, with_wide_vectors};
use crate::geometry::dtype::Dtype;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Whether tensors of a dtype can be cast to another.
pub fn can_cast(from: Dtype, to: Dtype) -> bool {
    const FLOATS: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::Bf16];
    from == to || FLOATS.contains(&from) && FLOATS.contains(&to)
}

/// Casts elements, rounding to nearest even. [`can_cast`] allows the pair of dtypes.
pub(crate) fn cast(from: Dtype, stored: &[u8], to: Dtype, out: &mut [u8]) {
    match (from, to) {
        (Dtype::F64, Dtype::F32) => convert(stored, out, |x: [u8; 8]| {
            (f64::from_le_bytes(x) as f32).to_le_bytes()
        }),
        (Dtype::F64, Dtype::F16) => convert(stored, out, |x: [u8; 8]| {
            f16::from_f32(round_to_odd(f64::from_le_bytes(x))).to_le_bytes()
        }),
        (Dtype::F64, Dtype::Bf16) => convert(stored, out, |x: [u8; 8]| {
            bf16::from_f32(round_to_odd(f64::from_le_bytes(x))).to_le_bytes()
        }),
        (Dtype::F32, Dtype::F64) => convert(stored, out, |x: [u8; 4]| {
            f64::from(f32::from_le_bytes(x)).to_le_bytes()
        }),
        (Dtype::F32, Dtype::F16) => single_to_half(stored, out),
        (Dtype::F32, Dtype::Bf16) => convert(stored, out, |x: [u8; 4]| {
            bf16::from_f32(f32::from_le_bytes(x)).to_le_bytes()
        }),
        (Dtype::F16, Dtype::F64) => convert(stored, out, |x: [u8; 2]| {
            f16::from_le_bytes(x).to_f64().to_le_bytes()
        }),
        (Dtype::F16, Dtype::F32) => convert(stored, out, |x: [u8; 2]| {
            f16::from_le_bytes(x).to_f32().to_le_bytes()
        }),
        (Dtype::F16, Dtype::Bf16) => {
            convert(stored, out, |x: [u8; 2]| {
                bf16::from_f32(f16::from_le_bytes(x).to_f32()).to_le_bytes()
            });
        }
        (Dtype::Bf16, Dtype::F64) => convert(stored, out, |x: [u8; 2]| {
            bf16::from_le_bytes(x).to_f64().to_le_bytes()
        }),
        (Dtype::Bf16, Dtype::F32) => convert(stored, out, |x: [u8; 2]| {
            bf16::from_le_bytes(x).to_f32().to_le_bytes()
        }),
        (Dtype::Bf16, Dtype::F16) => {
            convert(stored, out, |x: [u8; 2]| {
                f16::from_f32(bf16::from_le_bytes(x).to_f32()).to_le_bytes()
            });
        }
        _ => unreachable!("plans reject other casts"),
    }
}

/// Rounds to odd: a value that is not an f32 becomes the next f32 towards zero with its last bit set.
///
/// A second rounding to fewer bits then gives the result of a single rounding, because a value with an odd last bit is
/// never a tie (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
/// odd", 2008).
fn round_to_odd(value: f64) -> f32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the rounding is corrected below"
    )]
    let nearest = value as f32;
    if value.is_nan() || f64::from(nearest).to_bits() == value.to_bits() {
        return nearest;
    }
    let away = f64::from(nearest).abs() > value.abs();
    f32::from_bits((nearest.to_bits() - u32::from(away)) | 1)
}

/// Casts with the instructions of the processor for it, which takes slices of numbers only.
fn single_to_half(stored: &[u8], out: &mut [u8]) {
    const AT_ONCE: usize = 256;
    let (from, _) = stored.as_chunks::<4>();
    let (to, _) = out.as_chunks_mut::<2>();
    let (mut singles, mut halves) = ([0.0; AT_ONCE], [f16::ZERO; AT_ONCE]);
    for (from, to) in from.chunks(AT_ONCE).zip(to.chunks_mut(AT_ONCE)) {
        let (singles, halves) = (&mut singles[..from.len()], &mut halves[..from.len()]);
        for (single, bytes) in singles.iter_mut().zip(from) {
            *single = f32::from_le_bytes(*bytes);
        }
        halves.convert_from_f32_slice(singles);
        for (bytes, half) in to.iter_mut().zip(&*halves) {
            *bytes = half.to_le_bytes();
        }
    }
}

fn convert<const N: usize, const M: usize>(
    stored: &[u8],
    out: &mut [u8],
    one: impl Fn([u8; N]) -> [u8; M],
) {
    let (from, _) = stored.as_chunks::<N>();
    let (to, _) = out.as_chunks_mut::<M>();
    with_wide_vectors(Conversion { from, to, one });
}

/// The conversion of each element of a slice by a function.
struct Conversion<'a, const N: usize, const M: usize, F> {
    from: &'a [[u8; N]],
    to: &'a mut [[u8; M]],
    one: F,
}

impl<const N: usize, const M: usize, F: Fn([u8; N]) -> [u8; M]> Vectorised
    for Conversion<'_, N, M, F>
{
    type Output = ();

    #[expect(clippy::inline_always, reason = "as the trait asks")]
    #[inline(always)]
    fn run(self) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = (self.one)(*from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_rounds_to_even() {
        // Halfway between two bfloat16 values: the one with the even last bit is the result.
        for (wide, narrow) in [(0x3F80_8000_u32, 0x3F80_u16), (0x3F81_8000, 0x3F82)] {
            let mut out = [0; 2];
            cast(Dtype::F32, &wide.to_le_bytes(), Dtype::Bf16, &mut out);
            assert_eq!(u16::from_le_bytes(out), narrow);
        }
    }

    #[test]
    fn slices_of_every_length_are_cast_as_single_values() {
        let values: Vec<f32> = (0..1100_u32)
            .map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9)))
            .filter(|value| !value.is_nan())
            .collect();
        for n in (0..40).chain([255, 256, 257, 511, 512, 1000]) {
            let stored: Vec<u8> = values[..n].iter().flat_map(|x| x.to_le_bytes()).collect();
            let mut out = vec![0; 2 * n];
            cast(Dtype::F32, &stored, Dtype::F16, &mut out);
            let one_by_one = values[..n].iter();
            let halves: Vec<u8> = one_by_one
                .clone()
                .flat_map(|x| f16::from_f32(*x).to_le_bytes())
                .collect();
            assert_eq!(out, halves, "{n} values");
            cast(Dtype::F32, &stored, Dtype::Bf16, &mut out);
            let halves: Vec<u8> = one_by_one
                .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
                .collect();
            assert_eq!(out, halves, "{n} values");
        }
    }
}
