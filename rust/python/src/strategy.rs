//! Strategy files as records.

use crate::errors::raise;
use crate::records::{STRATEGY, STRATEGY_ITEM, STRATEGY_LAYOUT_ITEM};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use reshard_formats::strategy::{LayoutTuple, StrategyTuple, decode, encode};

#[pyfunction]
pub(crate) fn decode_strategy<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyTuple>> {
    let (stage, operators, layouts) = raise(py, decode(data))?;
    let operators = operators.into_iter().map(|one| STRATEGY_ITEM.of(py, one));
    let layouts = layouts
        .into_iter()
        .map(|one| STRATEGY_LAYOUT_ITEM.of(py, one));
    let operators = operators.collect::<PyResult<Vec<_>>>()?;
    STRATEGY.of(
        py,
        (stage, operators, layouts.collect::<PyResult<Vec<_>>>()?),
    )
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
