"""How far training has got: the steps that updates end, and what losses are scaled by."""
