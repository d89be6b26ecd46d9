"""The mark of tests that need Triton."""

from __future__ import annotations

import importlib.util

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
