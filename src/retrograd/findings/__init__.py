"""Findings: what is wrong with a run, where, since when, why, and what to do."""
