"""`retrograd inventory` in the process of a script."""
