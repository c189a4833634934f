"""Points at which a function has no derivative: which there are, what torch takes, and where a forward has them."""
