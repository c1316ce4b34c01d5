"""Other ways to write a conversation, and the search for the one that wrote recorded ids."""
