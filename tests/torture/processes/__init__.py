"""Attacks on the world around a run: kills, signals, full disks, vanishing logs, two runs at once, pipes."""
