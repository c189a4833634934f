"""The inventory: every tensor that autograd keeps between forward and backward, as a table."""
