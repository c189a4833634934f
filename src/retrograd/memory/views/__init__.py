"""Inventories, printed and as pages."""
