"""Policies: where what autograd saves waits for the backward pass. Their contract is in ``policy.py``."""
