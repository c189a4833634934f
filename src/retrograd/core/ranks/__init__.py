"""A program in several processes: what each holds of a tensor, and how gradients are reduced."""
