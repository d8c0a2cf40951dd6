"""One call: who calls, its message, its deadline, its status."""
