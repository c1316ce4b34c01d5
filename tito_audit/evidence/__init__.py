"""Stage 6: what was recorded, what would be written now, and every difference between them."""
