"""Measures reshard beside other libraries and the limits of the machine: `python -m benches`. See README.md."""
