"""Where: the names of places in a model, and ways to select them."""
