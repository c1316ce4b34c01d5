"""Rendering without Jinja, and which templates allow it."""
