"""What runs in a step: decoder layers as residual blocks, each one autograd function."""
