"""What is read from files that somebody else may have written."""
