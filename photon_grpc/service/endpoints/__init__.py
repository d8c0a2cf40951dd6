"""The addresses of the service, and its pages in plain HTTP."""
