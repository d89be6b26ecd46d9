"""What is done to a loaded model: adapters, `attach`, the packed forward and its loss, graphs, plans, the report."""
