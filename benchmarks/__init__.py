"""Measurements, one file each; `python -m benchmarks` lists them. Ratios are taken in one run on one machine."""
