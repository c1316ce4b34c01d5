"""Who continues whom: the links and chains of a rollout's calls, and what is made of them."""
