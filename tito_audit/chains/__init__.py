"""Which call continues which, and how their token ids are forked and spliced."""
