"""Models: loading, the families Pronghorn knows, adapters, and `attach`."""
