"""Store: run folders, written while a model trains and read by anybody."""
