"""Findings and comparisons, printed and as pages."""
