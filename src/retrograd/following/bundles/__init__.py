"""A node as a folder that runs again in another process."""
