"""Weights that several processes share: a part of each layer in each, gathered whole one layer ahead."""
