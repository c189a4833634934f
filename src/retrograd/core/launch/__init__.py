"""Start: how a script that knows nothing of this package is recorded."""
