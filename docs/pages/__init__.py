"""Pages of the site that are written from the code: each function returns files by their path."""
