"""The benchmarks behind bench.py, and what they share."""
