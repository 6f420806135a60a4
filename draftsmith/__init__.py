"""Draftsmith: exact speculative decoding, every drafter family, one verifier."""
