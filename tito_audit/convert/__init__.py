"""Logs of one format written as another, with a list of what is lost."""
