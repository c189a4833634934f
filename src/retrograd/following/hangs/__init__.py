"""Keep the last events of backward passes, and tell where one hangs."""
