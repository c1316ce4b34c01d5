"""Logs of one format written as another, and what is lost on the way."""
