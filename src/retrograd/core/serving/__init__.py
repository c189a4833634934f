"""Runs in a browser while they are recorded."""
