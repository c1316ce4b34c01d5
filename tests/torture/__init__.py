"""The torture room: the tool judged from outside, on logs that are broken on purpose."""
