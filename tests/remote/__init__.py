"""Servers that hold remote logs in tests: an S3-compatible store, a hub and a plain web server.

Each runs in a process of its own, writes down every request with the bytes that it sent, and fails when told to.
"""
