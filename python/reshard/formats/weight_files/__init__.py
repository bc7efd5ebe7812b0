"""Weights under other names than those of a Hugging Face model: diffusers, PEFT, numbered files, lists of files."""
