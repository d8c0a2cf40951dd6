"""gRPC's standard services: health, reflection, load reports."""
