"""Measuring: what a step costs, on what, and whether its numbers are right."""
