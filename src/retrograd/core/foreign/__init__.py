"""Readers of files that somebody else may have written."""
