"""The backward graph as plain data, and where its nodes were made."""
