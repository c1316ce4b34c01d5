"""How fast a scan is, measured: corpora out of seeds, engines in processes of their own, tables and a plot.

`python -m benchmarks` writes RESULTS.md; `benchmarks.planted` holds the scan against its reference engine.
"""
