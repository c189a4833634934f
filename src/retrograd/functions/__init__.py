"""Autograd Functions as objects."""
