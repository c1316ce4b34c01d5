"""Stage 4: text <-> ids <-> bytes."""
