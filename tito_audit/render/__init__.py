"""Messages to text, with the span of each, by a chat template in a sandbox."""
