"""Text for terminals: escaping, words, boxes, pages."""
