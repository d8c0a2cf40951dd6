"""Processes: the supervisor, what it starts, and the programs that it starts."""
