"""A rollout to look at, token by token; one model for the HTML report and `show`."""
