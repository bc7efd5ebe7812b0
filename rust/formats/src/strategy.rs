//! The messages of a strategy file of `MindSpore` (proto2, package `mindspore.straspb`), as plain tuples.
//!
//! Fields that must occur once are declared as repeated and counted, and 32-bit numbers are declared as 64-bit numbers
//! and range-checked: the decoder alone would accept several values, a missing value, and the low half of a number that
//! is too large. Repeated numbers are written unpacked, as `MindSpore` writes them, and read packed or unpacked.
//! Unknown fields are skipped. `python/reshard/layout/strategy.py` documents the meaning of the numbers.

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use prost::{DecodeError, Message};
use reshard_core::{Error, Kind, Result};

/// Most numbers in one list of an operator or a tensor, and most lists of an operator or a tensor.
const MAX_DIMS: usize = 1 << 10;
/// Most rows of parts of one tensor.
const MAX_ROWS: usize = 1 << 20;
/// Most operators and parameters of a file, and most lists of all of them.
const MAX_RECORDS: usize = 1 << 19;
const MAX_LISTS: usize = 1 << 21;

#[derive(Clone, PartialEq, Message)]
struct StrategyMap {
    #[prost(uint64, repeated, packed = "false", tag = "1")]
    current_stage: Vec<u64>,
    #[prost(message, repeated, tag = "2")]
    parallel_strategy_item: Vec<StrategyItem>,
    #[prost(message, repeated, tag = "3")]
    parallel_layout_item: Vec<LayoutItem>,
}

#[derive(Clone, PartialEq, Message)]
struct StrategyItem {
    #[prost(string, repeated, tag = "1")]
    node_name: Vec<String>,
    #[prost(message, repeated, tag = "2")]
    parallel_strategys: Vec<Strategys>,
}

#[derive(Clone, PartialEq, Message)]
struct Strategys {
    #[prost(uint64, repeated, packed = "false", tag = "1")]
    stage: Vec<u64>,
    #[prost(message, repeated, tag = "2")]
    parallel_strategy: Vec<Dims>,
}

#[derive(Clone, PartialEq, Message)]
struct LayoutItem {
    #[prost(string, repeated, tag = "1")]
    param_name: Vec<String>,
    #[prost(message, repeated, tag = "2")]
    parallel_layouts: Vec<Layouts>,
}

#[derive(Clone, PartialEq, Message)]
struct Layouts {
    #[prost(message, repeated, tag = "1")]
    dev_matrix: Vec<Dims>,
    #[prost(message, repeated, tag = "2")]
    tensor_map: Vec<Dims>,
    #[prost(message, repeated, tag = "3")]
    param_split_shape: Vec<Dims>,
    #[prost(message, repeated, tag = "4")]
    indices_offset: Vec<Dims>,
    #[prost(int64, repeated, packed = "false", tag = "5")]
    field: Vec<i64>,
    #[prost(int64, repeated, packed = "false", tag = "6")]
    opt_weight_shard_step: Vec<i64>,
    #[prost(int64, repeated, packed = "false", tag = "7")]
    opt_weight_shard_size: Vec<i64>,
}

/// `uint32`, `int32` and `int64` numbers. Declared as 64-bit numbers they have the same encoding.
#[derive(Clone, PartialEq, Message)]
struct Dims {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    dim: Vec<i64>,
}

/// Lists of numbers.
pub type Lists = Vec<Vec<i64>>;
/// `node_name, stage, parallel_strategy`
pub type StrategyTuple = (String, i64, Lists);
/// `param_name, dev_matrix, tensor_map, param_split_shape, indices_offset, field, step, size`
pub type LayoutTuple = (String, Lists, Lists, Lists, Lists, i64, i64, i64);

/// Decodes the messages of a strategy file: the current stage, the strategies and the layouts.
///
/// # Errors
/// [`Kind::Damaged`] if the bytes are not these messages, or a field does not occur once or is out of its range.
pub fn decode(data: &[u8]) -> Result<(i64, Vec<StrategyTuple>, Vec<LayoutTuple>)> {
    check_counts(data)?;
    let map = StrategyMap::decode(data).map_err(|error| {
        Error::new(
            Kind::Damaged,
            format!("not a strategy file in protobuf: {error}"),
        )
    })?;
    let strategies = map.parallel_strategy_item.into_iter().enumerate();
    let layouts = map.parallel_layout_item.into_iter().enumerate();
    Ok((
        unsigned(map.current_stage, "current_stage")?,
        strategies
            .map(|(n, item)| {
                strategy(item).map_err(|e| e.within(format_args!("parallel_strategy_item {n}")))
            })
            .collect::<Result<_>>()?,
        layouts
            .map(|(n, item)| {
                layout(item).map_err(|e| e.within(format_args!("parallel_layout_item {n}")))
            })
            .collect::<Result<_>>()?,
    ))
}

/// Refuses a file of too many messages before they are decoded: one of 2 bytes takes 50 times as many in memory.
fn check_counts(data: &[u8]) -> Result<()> {
    let mut counts = [0; 3];
    // What violates the encoding is reported by the decoder, which stops at the same place.
    let _ = count(data, 0, &mut counts);
    let limits = [
        ("operators and parameters", MAX_RECORDS),
        ("fields of operators and parameters", 2 * MAX_RECORDS),
        ("lists of numbers", MAX_LISTS),
    ];
    for (n, (what, most)) in counts.into_iter().zip(limits) {
        if n > most {
            return Err(damaged(format!(
                "the file has {n} {what}; at most {most} are allowed"
            )));
        }
    }
    Ok(())
}

/// Adds up the messages at each depth: records, their names and contents, and the lists in these.
fn count(mut data: &[u8], depth: usize, counts: &mut [usize; 3]) -> Result<(), DecodeError> {
    while !data.is_empty() {
        let (tag, wire) = decode_key(&mut data)?;
        if wire != WireType::LengthDelimited {
            skip_field(wire, tag, &mut data, DecodeContext::default())?;
            continue;
        }
        let n_bytes = usize::try_from(decode_varint(&mut data)?).unwrap_or(usize::MAX);
        let (message, rest) = data.split_at(n_bytes.min(data.len()));
        data = rest;
        let is_message = match depth {
            0 => matches!(tag, 2 | 3),
            1 => matches!(tag, 1 | 2),
            _ => matches!(tag, 1..=4),
        };
        counts[depth] += usize::from(is_message);
        if is_message && depth < 2 && (depth, tag) != (1, 1) {
            count(message, depth + 1, counts)?;
        }
    }
    Ok(())
}

fn strategy(item: StrategyItem) -> Result<StrategyTuple> {
    let name = once(item.node_name, "node_name")?;
    let strategys = once(item.parallel_strategys, "parallel_strategys")?;
    Ok((
        name,
        unsigned(strategys.stage, "stage")?,
        lists(
            strategys.parallel_strategy,
            "parallel_strategy",
            MAX_DIMS,
            UINT32,
        )?,
    ))
}

fn layout(item: LayoutItem) -> Result<LayoutTuple> {
    let name = once(item.param_name, "param_name")?;
    let layouts = once(item.parallel_layouts, "parallel_layouts")?;
    Ok((
        name,
        lists(layouts.dev_matrix, "dev_matrix", MAX_DIMS, UINT32)?,
        lists(layouts.tensor_map, "tensor_map", MAX_DIMS, INT32)?,
        lists(
            layouts.param_split_shape,
            "param_split_shape",
            MAX_ROWS,
            INT64,
        )?,
        lists(layouts.indices_offset, "indices_offset", MAX_ROWS, INT64)?,
        signed(layouts.field, "field")?,
        signed(layouts.opt_weight_shard_step, "opt_weight_shard_step")?,
        signed(layouts.opt_weight_shard_size, "opt_weight_shard_size")?,
    ))
}

type Range = std::ops::RangeInclusive<i64>;
const UINT32: Range = 0..=u32::MAX as i64;
const INT32: Range = i32::MIN as i64..=i32::MAX as i64;
const INT64: Range = i64::MIN..=i64::MAX;

/// The value of a field that must occur exactly once.
fn once<T>(values: Vec<T>, field: &str) -> Result<T> {
    let n = values.len();
    let mut values = values.into_iter();
    match (values.next(), n) {
        (Some(value), 1) => Ok(value),
        _ => Err(damaged(format!(
            "`{field}` must occur once, it occurs {n} times"
        ))),
    }
}

fn signed(values: Vec<i64>, field: &str) -> Result<i64> {
    within(once(values, field)?, field, &INT32)
}

fn unsigned(values: Vec<u64>, field: &str) -> Result<i64> {
    within(once(values, field)?.cast_signed(), field, &UINT32)
}

fn within(value: i64, field: &str, range: &Range) -> Result<i64> {
    if range.contains(&value) {
        return Ok(value);
    }
    let (low, high) = (range.start(), range.end());
    Err(damaged(format!(
        "`{field}` is {value}, expected {low} to {high}"
    )))
}

fn lists(messages: Vec<Dims>, field: &str, max: usize, range: Range) -> Result<Lists> {
    if messages.len() > MAX_DIMS {
        let n = messages.len();
        return Err(damaged(format!(
            "`{field}` has {n} lists; at most {MAX_DIMS} are allowed"
        )));
    }
    let mut lists = Vec::with_capacity(messages.len());
    for Dims { dim } in messages {
        if dim.len() > max {
            let n = dim.len();
            return Err(damaged(format!(
                "`{field}` has {n} numbers; at most {max} are allowed"
            )));
        }
        for &value in &dim {
            within(value, field, &range)?;
        }
        lists.push(dim);
    }
    Ok(lists)
}

fn damaged(message: String) -> Error {
    Error::new(Kind::Damaged, message)
}

/// Encodes the messages of a strategy file.
///
/// # Errors
/// [`Kind::Argument`] if a stage is negative.
pub fn encode(
    current_stage: i64,
    strategies: Vec<StrategyTuple>,
    layouts: Vec<LayoutTuple>,
) -> Result<Vec<u8>> {
    Ok(encoded(current_stage, strategies, layouts)?.encode_to_vec())
}

fn encoded(
    current_stage: i64,
    strategies: Vec<StrategyTuple>,
    layouts: Vec<LayoutTuple>,
) -> Result<StrategyMap> {
    let number = |value: i64| {
        u64::try_from(value).map_err(|_| {
            Error::new(
                Kind::Argument,
                format!("a stage is {value}; expected a number that is not negative"),
            )
        })
    };
    Ok(StrategyMap {
        current_stage: vec![number(current_stage)?],
        parallel_strategy_item: strategies
            .into_iter()
            .map(|(name, stage, dims)| {
                Ok(StrategyItem {
                    node_name: vec![name],
                    parallel_strategys: vec![Strategys {
                        stage: vec![number(stage)?],
                        parallel_strategy: messages(dims),
                    }],
                })
            })
            .collect::<Result<_>>()?,
        parallel_layout_item: layouts
            .into_iter()
            .map(
                |(name, matrix, map, split, offset, field, step, size)| LayoutItem {
                    param_name: vec![name],
                    parallel_layouts: vec![Layouts {
                        dev_matrix: messages(matrix),
                        tensor_map: messages(map),
                        param_split_shape: messages(split),
                        indices_offset: messages(offset),
                        field: vec![field],
                        opt_weight_shard_step: vec![step],
                        opt_weight_shard_size: vec![size],
                    }],
                },
            )
            .collect(),
    })
}

fn messages(lists: Lists) -> Vec<Dims> {
    lists.into_iter().map(|dim| Dims { dim }).collect()
}
