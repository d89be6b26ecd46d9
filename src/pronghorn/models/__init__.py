"""Models: the families Pronghorn knows, adapters, and `attach`."""
