"""The assembly of each process, and the only room that knows the concrete classes of all others."""
