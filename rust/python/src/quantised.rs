//! Quantised weights as ordinary tensors of an index.

use crate::errors::raise;
use crate::index::Index;
use pyo3::prelude::*;
use reshard_core::dtype::Dtype;
use reshard_core::{Error, Kind};
use reshard_formats::quantised::{Block, Recipe, Weight, add_to};
use std::path::PathBuf;

/// Name, dtype and shape; recipe with its numbers; keys of the parts.
type WeightArguments = (String, String, Vec<u64>, String, Vec<f64>, Vec<String>);

fn recipe(name: &str, numbers: &[f64]) -> reshard_core::Result<Recipe> {
    let number = |at: usize| numbers.get(at).copied().unwrap_or(0.0);
    #[expect(clippy::cast_sign_loss, reason = "the cast saturates")]
    let size = |at: usize| number(at) as u64;
    let found = match name {
        "scaled" => Recipe::Scaled {
            block: [size(0), size(1)],
            factor: number(2) as f32,
        },
        "e2m1" => Recipe::E2m1 {
            block: size(0),
            divides: size(1) == 1,
            positive: size(1) == 2,
        },
        "transposed" => Recipe::Transposed,
        "table" => Recipe::Table {
            block: size(0),
            nested: (size(1) > 0).then(|| size(1)),
            offset: number(2) as f32,
            signed: size(3) == 1,
        },
        "gptq" => Recipe::Gptq {
            bits: size(0) as u32,
            zero: number(1) as i32,
        },
        "codes" => Recipe::Codes {
            block: [size(0), size(1)],
        },
        "scales" => Recipe::Scales {
            block: [size(0), size(1)],
        },
        "constant" => Recipe::Constant {
            value: number(0) as f32,
        },
        "awq" => Recipe::Awq { group: size(0) },
        "packed" => Recipe::Packed {
            bits: size(0) as u32,
            group: size(1),
        },
        "blocks" => {
            let message = || format!("the values of blocks of type {} are not known", size(0));
            let found = Block::of_id(size(0) as u32);
            Recipe::Blocks(found.ok_or_else(|| Error::new(Kind::Unsupported, message()))?)
        }
        other => {
            let message = format!("there is no recipe `{other}` of quantised weights");
            return Err(Error::new(Kind::Argument, message));
        }
    };
    let sizes = match found {
        Recipe::Scaled { block, .. } | Recipe::Codes { block } | Recipe::Scales { block } => {
            block.to_vec()
        }
        Recipe::E2m1 { block, .. } | Recipe::Table { block, .. } => vec![block],
        Recipe::Gptq { bits, .. } => vec![u64::from(bits)],
        Recipe::Awq { group } => vec![group],
        Recipe::Packed { bits, group } => vec![u64::from(bits), group],
        Recipe::Transposed | Recipe::Blocks(_) | Recipe::Constant { .. } => Vec::new(),
    };
    let is_wide =
        matches!(found, Recipe::Gptq { bits, .. } | Recipe::Packed { bits, .. } if bits > 8);
    if sizes.contains(&0) || is_wide {
        let message = format!("the recipe `{name}` has the numbers {numbers:?}");
        return Err(Error::new(Kind::Argument, message));
    }
    Ok(found)
}

/// Adds a file to an index that has the values of quantised weights.
#[pyfunction]
pub(crate) fn add_quantised(
    py: Python<'_>,
    mut index: PyRefMut<'_, Index>,
    mut stored: PyRefMut<'_, Index>,
    path: PathBuf,
    weights: Vec<WeightArguments>,
) -> PyResult<u32> {
    let weights = weights
        .into_iter()
        .map(|(name, dtype, shape, kind, numbers, parts)| {
            Ok(Weight {
                name,
                dtype: Dtype::parse(&dtype)?,
                shape,
                recipe: recipe(&kind, &numbers)?,
                parts,
            })
        });
    let weights = raise(py, weights.collect::<reshard_core::Result<Vec<_>>>())?;
    let stored = std::mem::take(stored.core_mut());
    raise(py, add_to(index.core_mut(), stored, path, weights))
}
