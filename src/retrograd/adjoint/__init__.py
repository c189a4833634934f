"""Checks of adjoints."""
