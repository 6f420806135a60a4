"""Decoders, KV cache, backends, tokenizers."""
