//! Numbers of the parts of quantised weights as `f32`, and `f32` as the numbers that are written.

use half::{bf16, f16};
use reshard_core::dtype::Dtype;
use reshard_core::{Error, Kind, Result};

/// The values of the 16 codes of E2M1, the 4-bit float of MXFP4 and NVFP4.
pub(super) const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The values of the 256 codes of E4M3 without infinities, as torch's `float8_e4m3fn`.
pub(super) static E4M3: [f32; 256] = table(3, 7, true);
/// The values of the 256 codes of E5M2.
pub(super) static E5M2: [f32; 256] = table(2, 15, false);

/// The values of an 8-bit float by its code.
///
/// Args:
///     `mantissa`: bits of the mantissa.
///     `bias`: of the exponent.
///     `is_fn`: there are no infinities, and one NaN of each sign.
const fn table(mantissa: u32, bias: u32, is_fn: bool) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let number = code as u32;
        let sign = (number & 0x80) << 24;
        let exponent = (number & 0x7f) >> mantissa;
        let fraction = number & ((1 << mantissa) - 1);
        let largest = 0x7f >> mantissa;
        let magnitude = if exponent == largest && (!is_fn || fraction == (1 << mantissa) - 1) {
            if !is_fn && fraction == 0 {
                0x7f80_0000
            } else {
                0x7fc0_0000
            }
        } else if exponent > 0 {
            (exponent + 127 - bias) << 23 | fraction << (23 - mantissa)
        } else if fraction > 0 {
            // A subnormal number of the narrow format is a normal one here.
            let first = fraction.ilog2();
            (first + 128 - bias - mantissa) << 23 | (fraction << (23 - first)) & 0x7f_ffff
        } else {
            0
        };
        values[code] = f32::from_bits(sign | magnitude);
        code += 1;
    }
    values
}

/// The value of an exponent of 8 bits, as of E8M0: `2^(code - 127)`; the largest code is NaN.
pub(super) fn power(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        0xff => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// The numbers of a part as `f32`. Bytes without a dtype of floats are exponents of E8M0.
///
/// # Errors
/// The dtype is none of a scale.
pub(super) fn as_f32(dtype: Dtype, bytes: &[u8], out: &mut Vec<f32>) -> Result<()> {
    out.clear();
    match dtype {
        Dtype::F32 => out.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
        Dtype::Bf16 => {
            out.extend(
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|b| bf16::from_le_bytes(*b).to_f32()),
            );
        }
        Dtype::F16 => {
            out.extend(
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|b| f16::from_le_bytes(*b).to_f32()),
            );
        }
        Dtype::F8E4M3 => out.extend(bytes.iter().map(|b| E4M3[usize::from(*b)])),
        Dtype::F8E8M0 => out.extend(bytes.iter().map(|b| power(*b))),
        // transformers and the libraries of MXFP4 compute two to this power: the largest one is infinite.
        Dtype::U8 => out.extend(bytes.iter().map(|b| match b {
            0xff => f32::INFINITY,
            _ => power(*b),
        })),
        other => {
            let message = format!("{other} is no dtype of the scales of a quantised weight");
            return Err(Error::new(Kind::Unsupported, message));
        }
    }
    Ok(())
}

/// A dtype in which values are returned.
pub(super) trait Number: Sized {
    /// Bytes of a number.
    const N_BYTES: usize;
    /// Rounds to nearest even, and appends nothing: writes to exactly [`Self::N_BYTES`] bytes.
    fn put(value: f32, to: &mut [u8]);
}

impl Number for f32 {
    const N_BYTES: usize = 4;
    #[inline]
    fn put(value: f32, to: &mut [u8]) {
        to.copy_from_slice(&value.to_le_bytes());
    }
}

impl Number for bf16 {
    const N_BYTES: usize = 2;
    #[inline]
    fn put(value: f32, to: &mut [u8]) {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let bits = if value.is_nan() {
            bits >> 16 | 0x40
        } else {
            rounded
        };
        to.copy_from_slice(&(bits as u16).to_le_bytes());
    }
}

impl Number for f16 {
    const N_BYTES: usize = 2;
    #[inline]
    fn put(value: f32, to: &mut [u8]) {
        to.copy_from_slice(&f16::from_f32(value).to_le_bytes());
    }
}

/// Writes numbers, as many as fit.
#[inline]
pub(super) fn put_all<O: Number>(values: impl Iterator<Item = f32>, to: &mut [u8]) {
    for (value, to) in values.zip(to.chunks_exact_mut(O::N_BYTES)) {
        O::put(value, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_the_values_of_the_formats() {
        for (code, value) in [
            (0x00, 0.0),
            (0x01, 0.001_953_125),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0x7e, 448.0),
        ] {
            assert!((E4M3[code] - value).abs() == 0.0 && (E4M3[code | 0x80] + value).abs() == 0.0);
        }
        assert!(E4M3[0x7f].is_nan() && E4M3[0xff].is_nan());
        for (code, value) in [
            (0x01, 2_f32.powi(-16)),
            (0x3c, 1.0),
            (0x7b, 57344.0),
            (0x7c, f32::INFINITY),
        ] {
            assert_eq!(E5M2[code].to_bits(), value.to_bits());
        }
        assert!(E5M2[0x7d].is_nan());
        assert_eq!(power(127).to_bits(), 1_f32.to_bits());
        assert_eq!(power(0).to_bits(), 2_f32.powi(-127).to_bits());
    }
}
