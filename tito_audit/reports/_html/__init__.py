"""Parts of the `html` report: what is kept of the results, how it is packed, the page around it."""
