"""Several runs in one page: losses over each other, the map as ratio to the first, what only some have."""

from retrograd.explaining.views.comparing.comparison_page import write_comparison as write_comparison
