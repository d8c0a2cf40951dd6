"""What docs/operations.md cites from other files stands there so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS.parent / "benchmarks" / "results"
PAGE = (DOCS / "operations.md").read_text()
CAPACITY = PAGE.split("\n## Capacity\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("row", [line for line in CAPACITY.splitlines() if re.match(r"\| (chat|workload)", line)])
def test_rows_of_the_planning_table_are_rows_of_the_results(row: str) -> None:
    lines = (RESULTS / "serve_traffic_1b_h200.md").read_text().splitlines()
    assert any(line.startswith(row) for line in lines)


@pytest.mark.parametrize(
    ("figure", "source"),
    [
        ("49,929", "serve_1b_h200.md"),
        ("540.7", "serve_1b_h200.md"),
        ("85,843", "serve_1b_h200.md"),
        ("146.1", "serve_1b_h200.md"),
        ("88,074", "serve_multiplex_1b_h200.md"),
        ("62,613", "startup_1b_h200.md"),
        ("9.27", "startup_1b_h200.md"),
        ("4.98", "startup_1b_h200.md"),
    ],
)
def test_figures_are_those_of_the_results(figure: str, source: str) -> None:
    assert figure in PAGE
    assert figure.replace(",", "") in (RESULTS / source).read_text().replace(",", "")


def test_the_worked_example_adds_up() -> None:
    text = " ".join(CAPACITY.split())
    tokens, per_replica, held = 23_111 * 15 / 1_838, 500 * 189 / 5, 62_613 * 64
    for worked in (
        f"23,111 × 15 / 1,838 = {tokens:.0f} tokens",
        f"500 × 189 = {500 * 189:,} tok/s",
        f"over 5 replicas {per_replica:,.0f} each: {per_replica / 49_929 * 100:.0f} % of",
        f"× 0.701 s, were all as long as the p99, are {100 * 0.701:.0f} of",
        f"2 × 16 layers × 8 heads × 64 × 2 bytes = {2 * 16 * 8 * 64 * 2 // 1024} KiB",
        f"2 × 32 × 8 × 128 × 2 bytes = {2 * 32 * 8 * 128 * 2 // 1024} KiB",
        f"62,613 blocks of 64 tokens = {held / 1e6:.1f} million",
        f"take {70 * 4096 / 1e6:.2f} million, {70 * 4096 / held * 100:.0f} %",
    ):
        assert worked in text, worked


def test_the_rule_for_the_autoscaler_brings_its_metric() -> None:
    (rule,) = yaml.safe_load(re.findall(r"```yaml\n(rules:.*?)```", PAGE, re.DOTALL)[0])["rules"]
    autoscaler = yaml.safe_load((DOCS / "deploy" / "kubernetes" / "base" / "hpa.yaml").read_text())
    (metric,) = autoscaler["spec"]["metrics"]
    assert rule["seriesQuery"].partition("{")[0] == metric["pods"]["metric"]["name"]
