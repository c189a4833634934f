"""Exports: a run for other tools, and for trackers of experiments.

A tracker is a file here, which is loaded by those who use it.
"""
