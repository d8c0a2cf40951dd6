"""What children write to stderr."""
