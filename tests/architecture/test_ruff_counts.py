"""Rules of ruff that are not kept everywhere yet: their findings may only become fewer."""

from __future__ import annotations

import pytest

from tests.architecture.budgets import RULES, findings, recorded


@pytest.mark.parametrize("rule", RULES)
def test_findings_only_become_fewer(rule: str) -> None:
    found, limit = findings()[rule], recorded()["findings"][rule]
    command = f"ruff check --select {rule} --config lint.pylint.max-args=6 photon_grpc"
    assert found <= limit, f"{found} findings of {rule}, the limit is {limit}; see `{command}` for the new ones"
    assert found == limit, f"{found} findings of {rule}, {limit} are recorded: lower the number in budgets.toml"
