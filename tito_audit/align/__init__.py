"""Stage 5: recorded against canonical; arrays only."""
