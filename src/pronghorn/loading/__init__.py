"""What is loaded: checkpoints as they are published, GGUF files, saved adapters, weights in few bits."""
