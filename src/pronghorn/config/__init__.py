"""The recipe: its sections, what they may say, and how it is read."""
