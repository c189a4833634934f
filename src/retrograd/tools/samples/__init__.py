"""What each sample of a batch does to the parameters."""
