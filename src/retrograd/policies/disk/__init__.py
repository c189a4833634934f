"""The policy that keeps saved tensors in a file: written by one thread, read ahead by another."""
