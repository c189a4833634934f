"""Facts: what a recording notes beside statistics: calls and their lines, operations, modes, inputs, units."""
