"""Views: a history in, a picture or a table out."""
