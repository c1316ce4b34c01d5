"""Benchmarks of the scan: generated logs, engines in separate processes, tables and a plot.

`python -m benchmarks` writes RESULTS.md; `benchmarks.planted` compares the scan with its reference engine.
"""
