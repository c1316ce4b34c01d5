"""The nouns: messages, turns, training rows, findings. No files, no tokenizer."""
