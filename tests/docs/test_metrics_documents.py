"""The dashboard and the page of operations name metrics and labels that there are; the dashboard is what Grafana
imports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from photon_grpc.core.counts import Counts, Sums
from photon_grpc.core.stats import Load
from photon_grpc.observe import metrics
from photon_grpc.observe.exposition import Snapshot
from tests.frontend.fake_engine import FACTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana" / "photon-grpc.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
#: Put there by Prometheus itself.
OF_THE_SCRAPE = {"instance", "job"}
_NAME = re.compile(r"\b(?:photon_(?!grpc)|grpc_|http_request)[a-z0-9_]+")


def exposed() -> dict[str, set[str]]:
    """The name of every sample that the page may have, and its labels."""
    counts = Counts()
    for metric in metrics.COUNTED:
        (counts.observe if metric.bounds else counts.add)(metric, *([1.0] if metric.bounds else []), *metric.labels)
    sums = Sums()
    sums.update(0, counts.changed())
    page, _ = Snapshot(Load(), sums, True, FACTS).page("")
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


NAMES = exposed()


def queries() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_there_are_queries() -> None:
    assert len(list(queries())) > 30


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_a_query_names_existing_metrics(query: str) -> None:
    names = [name for name in _NAME.findall(query) if name not in all_labels()]
    assert names and not [name for name in names if name not in NAMES]
    labels = set.union(*(NAMES[name] for name in names)) | OF_THE_SCRAPE
    asked = set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", query))
    for group in re.findall(r"by \(([^)]*)\)", query):
        asked |= {label.strip() for label in group.split(",")}
    assert asked <= labels
    for opening, closing in ("()", "[]", "{}"):
        assert query.count(opening) == query.count(closing)


def all_labels() -> set[str]:
    return set.union(*NAMES.values())


def test_counters_are_queried_by_rate_and_gauges_are_not() -> None:
    for query in queries():
        for name in _NAME.findall(query):
            if name in NAMES:
                is_counter = name.endswith(("_total", "_bucket", "_count", "_sum"))
                in_rate = re.search(rf"(?:rate|increase)\({name}\b", query) is not None
                assert is_counter == in_rate, query


def test_a_single_stall_of_an_event_loop_is_shown() -> None:
    """One sample among a thousand: quantiles below 1 leave it out."""
    lags = [query for query in queries() if "photon_event_loop_lag_seconds_bucket" in query]
    assert any(query.startswith("histogram_quantile(1, ") for query in lags)


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in PANELS:
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(.*?)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target


def test_the_dashboard_is_what_grafana_imports() -> None:
    """The fields that its importer and its panels read; see Grafana's "dashboard JSON model"."""
    assert DASHBOARD["title"] and re.fullmatch(r"[A-Za-z0-9_-]{1,40}", DASHBOARD["uid"])
    assert "id" not in DASHBOARD, "an id is of one Grafana"
    assert isinstance(DASHBOARD["schemaVersion"], int)
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, f"{panel['title']} lies on another"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat") and panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in ("none", "s", "reqps", "percentunit")
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
        for name in re.findall(r"\$(?:{(\w+)}|(\w+))", json.dumps(panel)):
            assert (name[0] or name[1]) in {*variables, "__rate_interval"}


def test_every_metric_is_shown_in_operations() -> None:
    text = (DOCS / "operations.md").read_text()
    section = text[text.index("## Metrics by question") : text.index("## The log")]
    named = {name for name in _NAME.findall(section) if name not in all_labels()} - {"grpc_service"}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in NAMES}
    assert not {name for name in named if name not in families and name not in NAMES}
    # Of no question that an operator has every day.
    assert families - named == {
        "photon_engine_steps_total",
        "photon_engine_step_seconds",
        "photon_engine_outputs_total",
    }
