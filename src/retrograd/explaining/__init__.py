"""What is wrong with a run, why a gradient is missing, and where two runs diverge."""
