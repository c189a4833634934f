"""What notebooks show: HTML of what is printed elsewhere, pictures, and a cell that follows a recording."""
