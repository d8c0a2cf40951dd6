"""The HTTP server: requests and answers of HTTP APIs become asks and token streams; nothing is computed here."""
