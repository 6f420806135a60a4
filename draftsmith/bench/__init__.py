"""Benchmarking: workloads, paired runs, summaries."""
