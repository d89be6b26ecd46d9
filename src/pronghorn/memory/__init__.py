"""What each layer keeps for the backward pass."""
