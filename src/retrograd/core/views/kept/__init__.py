"""The part of a page that shows an inventory."""
