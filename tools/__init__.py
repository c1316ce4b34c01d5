"""What developers run by hand; nothing of it is shipped."""
