"""The children's log lines."""
