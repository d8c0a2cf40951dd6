"""The log of all processes: its lines, its pipe and its filter."""
