"""Saved tensors under a byte budget: a pass is measured, a plan is made of it, and later passes follow the plan."""
