"""What a run is set to do: flags, configuration files, Settings."""
