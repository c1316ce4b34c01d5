"""Recorded tokens against what template and tokenizer write today, with every difference."""
