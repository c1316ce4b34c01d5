"""Conversations for SFT, what TRL makes of them, and the faults that such sets have."""
