"""Two token sequences side by side: what they share, where they differ."""
