"""Parts of the `html` report: charts, findings and views as data, and the page around them."""
