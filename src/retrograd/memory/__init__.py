"""What rules and Functions keep between calls."""
