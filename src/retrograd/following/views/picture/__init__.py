"""The picture of a graph: modules that fold, a layered layout, SVG, and the page around it."""
