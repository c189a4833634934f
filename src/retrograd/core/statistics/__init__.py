"""Statistics of the elements of a tensor, and how they are read."""
