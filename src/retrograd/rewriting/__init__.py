"""Rules on models: where they are set and how they act."""
