"""Run parts of a backward graph again, with an engine of our own."""
