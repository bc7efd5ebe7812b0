"""A single `.safetensors` file."""
