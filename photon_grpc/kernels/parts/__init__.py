"""Device functions shared by kernels, and the plain data that describes their work."""
