"""The child processes, and their start, restart and end."""
