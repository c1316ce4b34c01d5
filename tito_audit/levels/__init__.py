"""The level of a log: what it holds of rollouts, from text to all that a trainer needs, and what is lacking."""
