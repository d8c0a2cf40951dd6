"""TCP connections of the HTTP door, with their limits, TLS, and the check of the pages that call."""
