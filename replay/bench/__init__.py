"""Benchmarks: ratios against a peer or a reference in the same run; `python -m bien.replay.bench.NAME`."""
