"""What autograd keeps between forward and backward, and where it may wait."""
