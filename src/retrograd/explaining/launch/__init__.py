"""`retrograd explain`, and findings while a script runs."""
