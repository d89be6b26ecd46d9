"""Measure Pronghorn and others: training steps, kernels, reports of both, and one script a question. Not shipped."""
