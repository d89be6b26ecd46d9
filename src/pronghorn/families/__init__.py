"""What is known of each model family: one file a family, and the registry that finds them."""
