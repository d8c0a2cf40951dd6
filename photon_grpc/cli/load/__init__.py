"""A load generator, and the report of its run."""
