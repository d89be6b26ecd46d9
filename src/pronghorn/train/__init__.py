"""Training: the trainer, its watch over gradients, and a whole run from a recipe."""
