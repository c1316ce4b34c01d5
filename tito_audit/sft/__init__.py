"""Chat data before SFT: its tokens, what a trainer would train of them, and what it would not."""
