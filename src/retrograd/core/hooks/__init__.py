"""The one room that touches torch: every hook is registered here, and every private name of torch used here."""
