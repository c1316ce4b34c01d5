"""A rollout for display, token by token; one model for the HTML report and `show`."""
