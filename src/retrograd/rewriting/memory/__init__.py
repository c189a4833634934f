"""Memory of rules and Functions between calls."""
