"""Rendering with minijinja, and static analysis of which templates allow it."""
