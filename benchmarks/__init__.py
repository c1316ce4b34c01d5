"""How fast a scan is, measured: corpora out of seeds, engines in processes of their own, a table and a plot."""
