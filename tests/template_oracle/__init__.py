"""What chat templates do, found by rendering alone: another opinion than the command's.

Nothing here imports the package. `chat.py` renders as transformers does, `facts.py` decides by conversations of
its own (`conversations.py`), `sources.py` finds templates, `published.py` has what frameworks say of them.
"""
