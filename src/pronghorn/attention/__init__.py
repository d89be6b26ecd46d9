"""Attention over packed rows: each document sees only itself."""
