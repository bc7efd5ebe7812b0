//! Strategy files as tuples.

use crate::errors::raise;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use reshard_formats::strategy::{LayoutTuple, StrategyTuple, decode, encode};

#[pyfunction]
pub(crate) fn decode_strategy(
    py: Python<'_>,
    data: &[u8],
) -> PyResult<(i64, Vec<StrategyTuple>, Vec<LayoutTuple>)> {
    raise(py, decode(data))
}

#[pyfunction]
pub(crate) fn encode_strategy(
    py: Python<'_>,
    current_stage: i64,
    parallel_strategy_item: Vec<StrategyTuple>,
    parallel_layout_item: Vec<LayoutTuple>,
) -> PyResult<Bound<'_, PyBytes>> {
    let data = encode(current_stage, parallel_strategy_item, parallel_layout_item);
    raise(py, data).map(|data| PyBytes::new(py, &data))
}
