"""Graphs and traces, printed and as pictures."""
