"""From files to packed batches: sources, files, formats → template, labels → parts, cache → packing → batch."""
