"""Which templates and which ways to build the next prompt keep what was sampled: a table with a proof per cell."""
