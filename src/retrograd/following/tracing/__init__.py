"""Observe every node of a backward pass, and explain one that raised."""
