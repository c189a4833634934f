"""Features, Functions with a memory, and a check of adjoints."""
