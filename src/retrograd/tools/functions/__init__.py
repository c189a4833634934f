"""Functions with a backward of their own, as objects that remember."""
