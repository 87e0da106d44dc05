"""Presets: one file each, whose `get_config()` returns a `Config`; `load_config(NAME)` finds it."""
