"""Compiles the programs of a run for devices that are not there: see docs/compile_for.md."""
