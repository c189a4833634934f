"""Comparing two runs: where they first part, and why."""
