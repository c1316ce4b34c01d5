"""Which call continues which: forks and splices of their token ids."""
