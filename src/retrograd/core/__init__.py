"""What records, keeps and shows a run; it imports no wing."""
