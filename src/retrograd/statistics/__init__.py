"""What is known of the elements of a tensor, and how it is read."""
