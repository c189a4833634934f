"""What autograd keeps, drawn: the part of a page that shows an inventory."""
