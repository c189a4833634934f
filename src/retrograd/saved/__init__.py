"""Saved tensors."""
