"""Rows of many ranks on their way into one folder."""
