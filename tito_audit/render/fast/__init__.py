"""A template's output without Jinja: which templates allow it, and their rendering."""
