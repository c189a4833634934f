"""What the picture of a graph is made of: modules that fold, a layered layout, SVG, and the page around it."""
