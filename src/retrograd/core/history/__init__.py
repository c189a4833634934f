"""Seen: what was recorded, in memory, and how it is read."""
