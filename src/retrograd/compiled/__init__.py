"""Taps and rules inside graphs of torch.compile."""
