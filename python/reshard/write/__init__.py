"""The one way out: what is written appears under its name whole or not at all."""
