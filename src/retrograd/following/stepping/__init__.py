"""Stop in the middle of a backward pass, look and change."""
