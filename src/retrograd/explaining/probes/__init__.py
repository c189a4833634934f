"""Questions to a model and a batch, each answered by a few runs of a copy."""
