"""Write recipes: from another tool's configuration (convert), or anew for a machine and a data set (first)."""
