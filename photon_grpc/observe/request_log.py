"""One JSON line for every request that ends: all of its record, and none of its text."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime

from photon_grpc.frontend.record import RequestRecord
from photon_grpc.observe.codes import code_of_reason
from photon_grpc.observe.metrics import finished_reason

LOGGER = "photon_grpc.access"

_LOG = logging.getLogger(LOGGER)
#: Bytes of labels in a line, which has to stay below 4 KiB to be written at once.
_MAX_LABEL_BYTES = 2048
#: version-traceid-parentid-flags, of any version but the forbidden ff.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class RequestLog:
    """A RequestObserver that writes the lines."""

    def ended(self, record: RequestRecord) -> None:
        line = fields(record)
        _LOG.info("%s", json.dumps(line), extra={"fields": line})


def fields(record: RequestRecord) -> dict[str, object]:
    """Return the fields of the line. Durations are milliseconds, or None if the request did not get that far."""
    origin, usage = record.origin, record.usage
    return {
        "event": "request",
        "time": datetime.fromtimestamp(record.end_time_s, UTC).isoformat(timespec="milliseconds"),
        "request_id": origin.request_id,
        "api_key": origin.owner,
        "method": origin.method,
        "model": origin.model,
        "labels": _labels(origin.labels),
        "code": code_of_reason(record.reason),
        "reason": record.reason,
        "field": record.field,
        "finish_reasons": [finished_reason(each) for each in record.finish_reasons],
        "prompt_tokens": usage.prompt_tokens,
        "cached_prompt_tokens": usage.cached_prompt_tokens,
        "output_tokens": usage.output_tokens,
        "draft_tokens": usage.draft_tokens,
        "accepted_draft_tokens": usage.accepted_draft_tokens,
        "preemptions": record.num_preemptions,
        "queue_ms": _ms(record.queue_s),
        "prefill_ms": _ms(record.prefill_s),
        "first_token_ms": _ms(record.first_token_s),
        "decode_ms": _ms(record.decode_s),
        "time_per_output_token_ms": _ms(record.time_per_output_token_s),
        "total_ms": _ms(record.total_s),
        "trace_id": _trace_id(origin.traceparent),
    }


def _labels(labels: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the labels that fit the line, and how many do not."""
    found: dict[str, str] = {}
    room = _MAX_LABEL_BYTES
    for key, value in labels:
        room -= len(json.dumps({key: value}))
        if room < 0:
            return found | {"…": f"{len(labels) - len(found)} more"}
        found[key] = value
    return found


def _ms(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s * 1000, 3)


def _trace_id(traceparent: str) -> str | None:
    match = _TRACEPARENT.fullmatch(traceparent)
    return match[1] if match else None
