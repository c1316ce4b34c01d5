"""What a viewer shows of a rollout: its sequences token by token, replacements, charts."""
