"""Options of a run: flags, configuration files and defaults."""
