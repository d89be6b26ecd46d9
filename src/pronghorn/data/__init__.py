"""From files to documents of token ids: reading rows, chat templates and labels, packing."""
