"""What a run did, on a card: described from its record alone, without judging it."""
