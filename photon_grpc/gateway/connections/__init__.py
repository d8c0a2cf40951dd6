"""TCP connections of the HTTP server, with their limits, TLS, and the check of the pages that call."""
