"""Tools that developers run by hand; none is shipped."""
