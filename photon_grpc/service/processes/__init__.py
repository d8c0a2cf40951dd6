"""The child processes and what keeps them alive."""
