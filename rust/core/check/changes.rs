//! How far the values of two arrays of floats are apart: their norms, that of their difference, and the largest one.
//!
//! Values are compared in double precision, block by block: a block of both arrays is widened in the first-level cache. Sums
//! are made in eight columns and joined in the order of the blocks, so they are the same on all processors and for any
//! number of threads. A block with a value that is not finite, or with a sum that is not, is looked at value by value.

use crate::bytes::cast::{can_cast, cast};
use crate::bytes::memory::{Vectorised, with_wide_vectors};
use crate::error::{Error, Kind, Result};
use crate::geometry::dtype::Dtype;
use rayon::prelude::*;

/// Values that are widened at a time.
const BLOCK: usize = 1 << 11;
/// Blocks of one task of a thread.
const BLOCKS_AT_ONCE: usize = 32;
const COLUMNS: usize = 8;
const WIDE: usize = size_of::<f64>();

/// What was found in two arrays.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Changes {
    /// Number of values that differ: in a bit if the dtypes are equal, else as numbers.
    pub n_different: u64,
    /// Number of values that are NaN on one side only.
    pub n_nan: u64,
    /// Number of values outside the tolerance; 0 without one.
    pub n_outside: u64,
    /// The largest absolute difference of two values of which none is NaN.
    pub max_abs: f64,
    /// The sum of the squares of the finite values of the first array.
    pub squares_a: f64,
    /// That of the second array.
    pub squares_b: f64,
    /// The sum of the squares of the differences that are finite.
    pub squares_change: f64,
}

impl Changes {
    fn join(mut self, other: Self) -> Self {
        self.n_different += other.n_different;
        self.n_nan += other.n_nan;
        self.n_outside += other.n_outside;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.squares_a += other.squares_a;
        self.squares_b += other.squares_b;
        self.squares_change += other.squares_change;
        self
    }

    fn is_finite(&self) -> bool {
        (self.squares_a + self.squares_b + self.squares_change).is_finite()
    }
}

/// One side: its dtype and bytes.
pub type Side<'a> = (Dtype, &'a [u8]);

/// Compares two arrays of floats with as many values, of F64, F32, F16 or BF16.
///
/// Args:
///     `tolerance`: the absolute and the relative one: two values are within it if their distance is at most
///         `absolute + relative * max(|x|, |y|)`, or both are NaN.
///
/// # Errors
/// A dtype is another one, or the numbers of values differ.
pub fn changes(a: Side<'_>, b: Side<'_>, tolerance: Option<(f64, f64)>) -> Result<Changes> {
    let sizes = [a, b].map(|(dtype, bytes)| (dtype.bits() as usize / 8, bytes.len()));
    let [n, m] = sizes.map(|(size, n_bytes)| n_bytes / size.max(1));
    let is_float = [a.0, b.0].iter().all(|one| can_cast(*one, Dtype::F64));
    if !is_float || n != m || sizes.iter().any(|(size, n_bytes)| size * n != *n_bytes) {
        let message = format!(
            "{} bytes of {} are compared with {} of {}",
            a.1.len(),
            a.0.name(),
            b.1.len(),
            b.0.name()
        );
        return Err(Error::new(Kind::Argument, message));
    }
    let [blocks_a, blocks_b] = [(a, sizes[0].0), (b, sizes[1].0)]
        .map(|((_, bytes), size)| bytes.par_chunks(size * BLOCK * BLOCKS_AT_ONCE));
    let found: Vec<_> = blocks_a
        .zip(blocks_b)
        .map(|(x, y)| of_blocks((a.0, x), (b.0, y), tolerance))
        .collect();
    Ok(found.into_iter().fold(Changes::default(), Changes::join))
}

fn of_blocks(a: Side<'_>, b: Side<'_>, tolerance: Option<(f64, f64)>) -> Changes {
    let (mut wide_a, mut wide_b) = (vec![0; BLOCK * WIDE], vec![0; BLOCK * WIDE]);
    let [blocks_a, blocks_b] =
        [a, b].map(|(dtype, bytes)| bytes.chunks(dtype.bits() as usize / 8 * BLOCK));
    let mut all = Changes::default();
    for (bytes_a, bytes_b) in blocks_a.zip(blocks_b) {
        let x = widened((a.0, bytes_a), &mut wide_a);
        let found = if a.0 == b.0 && bytes_a == bytes_b {
            of_equal(x)
        } else {
            let y = widened((b.0, bytes_b), &mut wide_b);
            let bits = (a.0 == b.0).then_some((bytes_a, bytes_b));
            of_block(x, y, bits, tolerance)
        };
        all = all.join(found);
    }
    all
}

fn of_equal(x: &[[u8; WIDE]]) -> Changes {
    let mut squares = with_wide_vectors(Squares(x));
    if !squares.is_finite() {
        squares = finite_squares(x);
    }
    Changes {
        squares_a: squares,
        squares_b: squares,
        ..Changes::default()
    }
}

/// Compares the values of a block.
///
/// Args:
///     `stored`: the bytes of both sides before they were widened, if their dtypes are equal.
fn of_block(
    x: &[[u8; WIDE]],
    y: &[[u8; WIDE]],
    stored: Option<(&[u8], &[u8])>,
    tolerance: Option<(f64, f64)>,
) -> Changes {
    let mut found = if stored.is_some() {
        with_wide_vectors(Compare::<true>(x, y))
    } else {
        with_wide_vectors(Compare::<false>(x, y))
    };
    if !found.is_finite() {
        return one_by_one(x, y, stored, tolerance);
    }
    if let Some(tolerance) = tolerance {
        found.n_outside = with_wide_vectors(Outside(x, y, tolerance));
    }
    found
}

/// The values as doubles.
fn widened<'a>((dtype, bytes): Side<'_>, to: &'a mut [u8]) -> &'a [[u8; WIDE]] {
    let to = &mut to[..bytes.len() / (dtype.bits() as usize / 8) * WIDE];
    if dtype == Dtype::F64 {
        to.copy_from_slice(bytes);
    } else {
        cast(dtype, bytes, Dtype::F64, to);
    }
    to.as_chunks().0
}

type Row = [f64; COLUMNS];

#[expect(clippy::inline_always, reason = "a part of a loop of wide vectors")]
#[inline(always)]
fn row(x: &[[u8; WIDE]]) -> Row {
    let mut row = [0.0; COLUMNS];
    for (to, from) in row.iter_mut().zip(x) {
        *to = f64::from_le_bytes(*from);
    }
    row
}

/// A function of the values in each column: the compiler makes one vector instruction of each step of it.
#[expect(clippy::inline_always, reason = "a part of a loop of wide vectors")]
#[inline(always)]
fn each(a: &Row, b: &Row, step: impl Fn(f64, f64) -> f64) -> Row {
    let mut row = [0.0; COLUMNS];
    for i in 0..COLUMNS {
        row[i] = step(a[i], b[i]);
    }
    row
}

/// Calls a function with rows of both sides; the values that are missing in the last one are 0.
#[expect(clippy::inline_always, reason = "a part of a loop of wide vectors")]
#[inline(always)]
fn for_rows(x: &[[u8; WIDE]], y: &[[u8; WIDE]], mut call: impl FnMut(Row, Row)) {
    let (rows_x, rest_x) = x.as_chunks::<COLUMNS>();
    let (rows_y, rest_y) = y.as_chunks::<COLUMNS>();
    for (x, y) in rows_x.iter().zip(rows_y) {
        call(row(x), row(y));
    }
    call(row(rest_x), row(rest_y));
}

/// The sum of the squares of some values.
struct Squares<'a>(&'a [[u8; WIDE]]);

impl Vectorised for Squares<'_> {
    type Output = f64;

    #[expect(clippy::inline_always, reason = "as the trait asks")]
    #[inline(always)]
    fn run(self) -> f64 {
        let mut sums = [0.0; COLUMNS];
        for_rows(self.0, self.0, |x, _| {
            sums = each(&sums, &x, |sum, x| sum + x * x);
        });
        sums.iter().sum()
    }
}

/// The comparison of some values, without a tolerance. It counts only if all its sums are finite: then all values are.
struct Compare<'a, const SAME_DTYPE: bool>(&'a [[u8; WIDE]], &'a [[u8; WIDE]]);

impl<const SAME_DTYPE: bool> Vectorised for Compare<'_, SAME_DTYPE> {
    type Output = Changes;

    #[expect(clippy::inline_always, reason = "as the trait asks")]
    #[inline(always)]
    fn run(self) -> Changes {
        let (mut n_different, mut max_abs) = ([0.0; COLUMNS], [0.0; COLUMNS]);
        let mut squares = [[0.0; COLUMNS]; 3];
        for_rows(self.0, self.1, |x, y| {
            let change = each(&x, &y, |x, y| x - y);
            squares[0] = each(&squares[0], &x, |sum, x| sum + x * x);
            squares[1] = each(&squares[1], &y, |sum, y| sum + y * y);
            squares[2] = each(&squares[2], &change, |sum, one| sum + one * one);
            let distance = each(&change, &change, |one, _| one.abs());
            max_abs = each(
                &max_abs,
                &distance,
                |max, one| {
                    if one > max { one } else { max }
                },
            );
            // A number has the same bits after it is widened only if it had before. 0 differs from -0 there.
            let differs = each(&x, &y, |x, y| {
                #[expect(clippy::double_comparisons, reason = "`!=` of floats is another lint")]
                let differs = if SAME_DTYPE {
                    x.to_bits() != y.to_bits()
                } else {
                    x < y || x > y
                };
                if differs { 1.0 } else { 0.0 }
            });
            n_different = each(&n_different, &differs, |n, one| n + one);
        });
        let [squares_a, squares_b, squares_change] = squares.map(|sums| sums.iter().sum());
        Changes {
            n_different: whole(n_different.iter().sum()),
            n_nan: 0,
            n_outside: 0,
            max_abs: max_abs.into_iter().fold(0.0, f64::max),
            squares_a,
            squares_b,
            squares_change,
        }
    }
}

/// How many finite values are outside a tolerance.
struct Outside<'a>(&'a [[u8; WIDE]], &'a [[u8; WIDE]], (f64, f64));

impl Vectorised for Outside<'_> {
    type Output = u64;

    #[expect(clippy::inline_always, reason = "as the trait asks")]
    #[inline(always)]
    fn run(self) -> u64 {
        let (absolute, relative) = self.2;
        let mut n_outside = [0.0; COLUMNS];
        for_rows(self.0, self.1, |x, y| {
            let most = each(
                &x,
                &y,
                |x, y| {
                    if x.abs() > y.abs() { x.abs() } else { y.abs() }
                },
            );
            let allowed = each(&most, &most, |most, _| absolute + relative * most);
            let distance = each(&x, &y, |x, y| (x - y).abs());
            let outside = each(&distance, &allowed, |distance, allowed| {
                if distance > allowed { 1.0 } else { 0.0 }
            });
            n_outside = each(&n_outside, &outside, |n, one| n + one);
        });
        whole(n_outside.iter().sum())
    }
}

/// A number of values in a block.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "at most the size of a block"
)]
fn whole(n: f64) -> u64 {
    n as u64
}

fn finite_squares(x: &[[u8; WIDE]]) -> f64 {
    let values = x.iter().map(|x| f64::from_le_bytes(*x));
    values.filter(|x| x.is_finite()).map(|x| x * x).sum()
}

/// Compares values of which some are not finite, or are large.
///
/// Args:
///     `stored`: as of [`of_block`].
fn one_by_one(
    x: &[[u8; WIDE]],
    y: &[[u8; WIDE]],
    stored: Option<(&[u8], &[u8])>,
    tolerance: Option<(f64, f64)>,
) -> Changes {
    let mut found = Changes {
        squares_a: finite_squares(x),
        squares_b: finite_squares(y),
        ..Changes::default()
    };
    let n = x.len();
    for (i, (x, y)) in x.iter().zip(y).enumerate() {
        let (x, y) = (f64::from_le_bytes(*x), f64::from_le_bytes(*y));
        let is_nan = x.is_nan() || y.is_nan();
        #[expect(clippy::float_cmp, reason = "two infinities are equal")]
        let is_same = x == y || x.is_nan() && y.is_nan();
        let change = x - y;
        let distance = if is_same || is_nan { 0.0 } else { change.abs() };
        let is_different = stored.map_or(!is_same, |(a, b)| {
            let size = a.len() / n;
            let at = i * size..(i + 1) * size;
            a[at.clone()] != b[at]
        });
        // An infinity is within the tolerance of an equal one only, although its allowance is infinite.
        let is_outside = tolerance.is_some_and(|(absolute, relative)| {
            let allowed = absolute + relative * x.abs().max(y.abs());
            let is_close = !is_nan && distance < f64::INFINITY && distance <= allowed;
            !(is_same || is_close)
        });
        found.n_different += u64::from(is_different);
        found.n_nan += u64::from(x.is_nan() != y.is_nan());
        found.n_outside += u64::from(is_outside);
        found.max_abs = found.max_abs.max(distance);
        if change.is_finite() {
            found.squares_change += change * change;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn singles(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn sums_do_not_depend_on_the_threads() {
        let a: Vec<f32> = (0..300_000)
            .map(|i| f32::from(u16::try_from(i % 977).unwrap()) * 0.3)
            .collect();
        let mut b = a.clone();
        b[299_999] += 1.0;
        b[70_000] = f32::NAN;
        let (a, b) = (singles(&a), singles(&b));
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.unwrap()
                .install(|| changes((Dtype::F32, &a), (Dtype::F32, &b), Some((0.5, 0.0))))
        };
        let found = with(1).unwrap();
        assert_eq!((found.n_different, found.n_nan, found.n_outside), (2, 1, 2));
        assert_eq!(found, with(3).unwrap());
    }

    #[test]
    fn only_as_many_floats_are_compared() {
        let bytes = [0; 12];
        let of = |a, b| changes(a, b, None).map_err(|error| error.kind());
        let refused = Err(Kind::Argument);
        assert_eq!(of((Dtype::F32, &bytes), (Dtype::F64, &bytes)), refused);
        assert_eq!(of((Dtype::I32, &bytes), (Dtype::I32, &bytes)), refused);
        assert_eq!(of((Dtype::F64, &bytes), (Dtype::F64, &bytes)), refused);
        assert_eq!(
            of((Dtype::F32, &[]), (Dtype::F16, &[])),
            Ok(Changes::default())
        );
    }
}
