"""Engines that run a model, each behind the interface of `export.compare.Engine`."""
