"""Model files: GGUF, safetensors, the model catalogue."""
