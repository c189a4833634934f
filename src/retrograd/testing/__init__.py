"""Contract tests that parts written by users can run too."""
