"""Rollouts, turns, training rows, messages, findings; no files, no tokenizer."""
