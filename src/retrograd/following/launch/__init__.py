"""`retrograd trace` and `retrograd debug` in the process of a script."""
