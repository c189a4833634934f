"""The parts that all HTML pages share: frame, colours and controls, and how data and scripts get into them."""
