"""Messages to text by a sandboxed chat template, with the span of each message."""
