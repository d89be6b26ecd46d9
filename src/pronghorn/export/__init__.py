"""Saving what was trained, for others to load."""
