"""Logs with known causes of mismatch, and whether the tool names them: `python -m tests.mismatch`."""
