//! The dtypes of the safetensors format and their sizes.

use crate::error::{Error, Kind, Printable, Result};
use std::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal;)*) => {
        /// An element type, named as in a safetensors header.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Dtype { $($(#[$doc])* $variant,)* }

        impl Dtype {
            /// All dtypes, by ascending width.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name in a header.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Bits of one element.
            pub fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits,)* }
            }
        }
    };
}

dtypes! {
    /// 4-bit float, two per byte.
    F4 = "F4", 4;
    /// 6-bit float (2 exponent bits), four in three bytes.
    F6E2M3 = "F6_E2M3", 6;
    /// 6-bit float (3 exponent bits), four in three bytes.
    F6E3M2 = "F6_E3M2", 6;
    /// Boolean, one byte.
    Bool = "BOOL", 8;
    /// Unsigned 8-bit integer.
    U8 = "U8", 8;
    /// Signed 8-bit integer.
    I8 = "I8", 8;
    /// 8-bit float, 5 exponent bits.
    F8E5M2 = "F8_E5M2", 8;
    /// 8-bit float, 4 exponent bits.
    F8E4M3 = "F8_E4M3", 8;
    /// 8-bit exponent only (block scales).
    F8E8M0 = "F8_E8M0", 8;
    /// 8-bit float, 4 exponent bits, no negative zero.
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// 8-bit float, 5 exponent bits, no negative zero.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// Signed 16-bit integer.
    I16 = "I16", 16;
    /// Unsigned 16-bit integer.
    U16 = "U16", 16;
    /// IEEE half precision.
    F16 = "F16", 16;
    /// bfloat16.
    Bf16 = "BF16", 16;
    /// Signed 32-bit integer.
    I32 = "I32", 32;
    /// Unsigned 32-bit integer.
    U32 = "U32", 32;
    /// IEEE single precision.
    F32 = "F32", 32;
    /// Complex of two 32-bit floats.
    C64 = "C64", 64;
    /// IEEE double precision.
    F64 = "F64", 64;
    /// Signed 64-bit integer.
    I64 = "I64", 64;
    /// Unsigned 64-bit integer.
    U64 = "U64", 64;
}

impl Dtype {
    /// Returns the dtype of a name in a header.
    pub fn parse(name: &str) -> Result<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|d| d.name() == name)
            .ok_or_else(|| {
                let known: Vec<_> = Self::ALL.iter().map(|d| d.name()).collect();
                Error::new(
                    Kind::Unsupported,
                    format!("unknown dtype `{}`", Printable(name)),
                )
                .hint(format!("known dtypes: {}", known.join(", ")))
            })
    }

    /// Whether elements are real floating-point numbers, which a cast changes. A complex number is not.
    pub fn is_float(self) -> bool {
        match self {
            Self::F4
            | Self::F6E2M3
            | Self::F6E3M2
            | Self::F8E5M2
            | Self::F8E4M3
            | Self::F8E8M0
            | Self::F8E4M3Fnuz
            | Self::F8E5M2Fnuz
            | Self::F16
            | Self::Bf16
            | Self::F32
            | Self::F64 => true,
            Self::Bool
            | Self::U8
            | Self::I8
            | Self::I16
            | Self::U16
            | Self::I32
            | Self::U32
            | Self::C64
            | Self::I64
            | Self::U64 => false,
        }
    }

    /// Elements and bytes of the smallest group that ends at a byte boundary: (1, 2) for BF16, (2, 1) for F4.
    pub fn unit(self) -> (u64, u64) {
        match self.bits() {
            4 => (2, 1),
            6 => (4, 3),
            bits => (1, bits / 8),
        }
    }

    /// Bytes of a tensor; `None` if the number overflows or is not an integer.
    pub fn n_bytes(self, shape: &[u64]) -> Option<u64> {
        let bits = n_elements(shape)?.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// Product of a shape; `None` if it overflows. It is 0 if an extent is 0, for any other extents.
pub fn n_elements(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape
        .iter()
        .try_fold(1_u64, |n, &extent| n.checked_mul(extent))
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
