"""Quantised weights: one logical tensor that is stored as packed values and the parts that they need to be read.

A library that quantises a weight stores it as several tensors: the packed values, and scales, zero points or tables.
None of them can be read without the others. So they are one logical tensor here:

- `recognise` finds them by names, dtypes and shapes, and by what `config.json` says. Both must agree, and no part may
  be missing: a default such as 1.0 for a scale would be a silent change of every value.
- `together` keeps the parts with their weight: they are selected, left out and renamed together, and divided over ranks
  together. A division through a block of values that share a scale is refused.
- `dequantise` makes a view of a checkpoint in which each of them is one ordinary float32 tensor. Its bytes are computed
  when they are read, tile by tile, in Rust (`rust/formats/src/quantised`). Formats, layouts, name maps and casts then
  apply to it as to any other tensor, and a conversion needs no more memory than for any other source.
- `quantise` makes the view in the other direction, for block-scaled FP8.

`kinds` lists the kinds, `config` reads what `config.json` says of them. Nothing here knows a file format: tensors are
those of an index.
"""
