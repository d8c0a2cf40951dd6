"""A caller's schema for the compiler, written anew where the compiler would let through what does not validate."""

from __future__ import annotations

from photon_grpc.frontend.formats import exact_formats
from photon_grpc.frontend.number_bounds import exact_bounds
from photon_grpc.frontend.one_of import as_any_of
from photon_grpc.frontend.patterns import exact_classes


def exact_schema(schema: str) -> str:
    """The schema, a JSON text, as it is where there is nothing to change, or no JSON."""
    # Bounds first: they are read with all their digits.
    return exact_formats(exact_classes(as_any_of(exact_bounds(schema))))
