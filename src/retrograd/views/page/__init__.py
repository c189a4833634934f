"""What all HTML pages share: their frame, their colours and controls, and how data and scripts get into them."""
