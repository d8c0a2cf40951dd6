"""The assembly of each process, and the only package that knows the concrete classes of all others."""
