"""Stage 3: messages -> text and spans."""
