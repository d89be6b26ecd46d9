"""What is wrong with an installation, and the command that mends it."""
