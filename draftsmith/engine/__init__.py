"""The engine: scheduling, the one step, streaming, the Python API."""
