"""Arithmetic of repairs on plain integer sequences: splice, mask, fork; no files, no templates."""
