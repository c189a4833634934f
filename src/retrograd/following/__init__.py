"""The backward graph, and what runs in it, node by node."""
