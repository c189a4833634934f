"""Checks of adjoints, in a notebook."""
