from __future__ import annotations

import grimp
import pytest


@pytest.fixture(scope="session")
def graph() -> grimp.ImportGraph:
    """The imports of the package as import-linter sees them."""
    return grimp.build_graph("photon_grpc", include_external_packages=True, exclude_type_checking_imports=True)
