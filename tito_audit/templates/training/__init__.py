"""Variants of a chat template that keep history as it was sampled, found by editing it and proved by rendering."""
