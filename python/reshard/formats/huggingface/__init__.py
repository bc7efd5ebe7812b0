"""Hugging Face folders: `model.safetensors`, or several files and an index."""
