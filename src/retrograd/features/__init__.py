"""Activations as features."""
