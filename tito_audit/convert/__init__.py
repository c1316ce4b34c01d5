"""Converts logs from one format to another, and lists what is lost."""
