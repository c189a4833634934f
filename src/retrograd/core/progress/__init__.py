"""The progress of training: the steps that updates end, and what losses are scaled by."""
