"""Record: what is seen at the taps becomes rows, events and kept tensors for a sink."""
