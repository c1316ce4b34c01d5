"""What a chat template does with a conversation: what it keeps, rewrites, adds and refuses."""
