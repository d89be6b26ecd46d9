"""What a run leaves for people: its record, pages made of it, and the model card."""
