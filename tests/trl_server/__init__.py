"""TRL's own server over a scripted engine: `serve.py` runs in a Python that has TRL 1.0 to 1.10."""
