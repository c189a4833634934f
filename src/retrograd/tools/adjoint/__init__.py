"""Verify: whether each module's backward is the transpose of its derivative."""
