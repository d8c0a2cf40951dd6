"""Stubs of the services that operate a replica."""
