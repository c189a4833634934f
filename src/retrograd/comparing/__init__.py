"""Two runs held against each other: where they part first, and why."""
