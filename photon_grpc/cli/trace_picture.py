"""A step trace as a page of HTML or an SVG: a bar for every sequence, and below it tokens, KV blocks and the queue."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise

from photon_grpc.cli.trace_lines import SequenceLine, StepRun, Trace, TracedStep

_LEFT, _RIGHT, _GAP = 64, 20, 26
_CUT_WIDTH = 18
_TICK_WIDTH = 120
#: Pixels for a step on the average, and for all.
_STEP_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 7.0, 1000.0, 7000.0
#: Pixels of a letter in the bars.
_LETTER_WIDTH = 6.2
_MAX_LETTERS = 24
#: Sequences side by side -> pixels of one.
_LANE_HEIGHTS = ((24, 18), (64, 14), (128, 9))
_LEAST_LANE_HEIGHT = 5

_STYLE = """
:root { --ink: #1d2733; --faint: #7b8794; --line: #dfe4ea; --paper: #ffffff; --cut: #f3f5f7;
  --prefill: #e07b39; --decode: #3a78c9; --waiting: #c4ccd4; --bad: #c9302c; --cached: #9fc5e8; --limbo: #d9b44a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --faint: #8d99a6; --line: #333d48; --paper: #171c22;
  --cut: #1f262e; --waiting: #56616d; --cached: #41658b; } }
body { background: var(--paper); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; margin: 24px; }
h1 { font-size: 18px; margin: 0; } p { margin: 2px 0 14px; color: var(--faint); }
.scroll { overflow-x: auto; } text { font: 11px system-ui, sans-serif; fill: var(--ink); }
.faint { fill: var(--faint); } .end { text-anchor: end; } .middle { text-anchor: middle; }
.title { font-weight: 600; } .on { fill: #fff; pointer-events: none; } .grid { stroke: var(--line); }
.prefill { fill: var(--prefill); } .decode { fill: var(--decode); } .cached { fill: var(--cached); }
.limbo { fill: var(--limbo); } .owned { fill: var(--decode); } .queue { fill: var(--waiting); }
.chunk { stroke: var(--paper); stroke-width: .6; } .cut { fill: var(--cut); }
.waits { stroke: var(--waiting); stroke-width: 2; } .lost { stroke: var(--bad); stroke-width: 2; }
.stalled { stroke: var(--decode); stroke-width: 1; stroke-dasharray: 2 2; }
.bad { fill: none; stroke: var(--bad); stroke-width: 1.6; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-bottom: 10px; } .legend svg { vertical-align: -2px; }
"""

_LEGEND = (
    ('<rect y="2" width="20" height="9" class="prefill"/>', "prefill: a chunk of a prompt"),
    ('<rect y="2" width="20" height="9" class="decode"/>', "decode: a token a step"),
    ('<path d="M0 6H20" class="waits"/>', "waits in the queue"),
    ('<path d="M0 6H20" class="stalled"/>', "has its seat, not in the step"),
    ('<path d="M6 0V12" class="lost"/>', "preempted: its blocks went to others"),
    ('<path d="M3 2L11 10M11 2L3 10" class="bad"/>', "failed or cancelled"),
)


def page(trace: Trace, name: str) -> str:
    """HTML: what the trace is, the key, the picture."""
    legend = "".join(
        f'<span><svg width="22" height="13">{shape}</svg> {escape(text)}</span>' for shape, text in _LEGEND
    )
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(name)}</h1><p>{escape(_summary(trace))}</p>"
        f'<div class="legend">{legend}</div><div class="scroll">{_svg(trace)}</div></html>\n'
    )


def image(trace: Trace) -> str:
    """The picture alone, as SVG."""
    return _svg(trace, f"<style>{_STYLE}svg {{ background: var(--paper); }}</style>") + "\n"


def _svg(trace: Trace, style: str = "") -> str:
    axis = Axis(trace)
    height, drawn = _panels(trace, axis)
    width = round(axis.width + _LEFT + _RIGHT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{style}{drawn}</svg>"
    )


class Axis:
    """Seconds to pixels; idle times are cut to a strip of a fixed width."""

    def __init__(self, trace: Trace) -> None:
        start_s, end_s = trace.steps[0].start_s, trace.steps[-1].end_s
        self.busy_s = max(end_s - start_s - sum(end - start for start, end in trace.cuts), 1e-6)
        self.width = min(max(len(trace.steps) * _STEP_WIDTH, _LEAST_WIDTH), _MOST_WIDTH) + _CUT_WIDTH * len(trace.cuts)
        self._scale = (self.width - _CUT_WIDTH * len(trace.cuts)) / self.busy_s
        #: Of every stretch of work: its start, the pixel where it starts, its end.
        self.stretches: list[tuple[float, float, float]] = []
        x = float(_LEFT)
        for cut_start_s, cut_end_s in (*trace.cuts, (end_s, end_s)):
            self.stretches.append((start_s, x, cut_start_s))
            x += (cut_start_s - start_s) * self._scale + _CUT_WIDTH
            start_s = cut_end_s
        self._starts_s = [start_s for start_s, _, _ in self.stretches]

    def x(self, time_s: float) -> float:
        number = max(bisect_right(self._starts_s, time_s) - 1, 0)
        start_s, x, end_s = self.stretches[number]
        return x + (min(max(time_s, start_s), end_s) - start_s) * self._scale

    def is_cut(self, end_s: float, start_s: float) -> bool:
        """Return whether there is a cut between the end of a step and the start of the next."""
        return bisect_right(self._starts_s, end_s) != bisect_right(self._starts_s, start_s)

    def ticks(self) -> list[tuple[float, str]]:
        """Round seconds and where they are."""
        wanted_s = _TICK_WIDTH / self._scale
        power = 10.0 ** math.floor(math.log10(wanted_s))
        every_s = next(step * power for step in (1, 2, 5, 10) if step * power >= wanted_s)
        ticks = []
        for start_s, _, end_s in self.stretches:
            number = int(start_s / every_s) + 1
            while number * every_s <= end_s:
                ticks.append((self.x(number * every_s), _seconds(number * every_s)))
                number += 1
        return ticks


def _panels(trace: Trace, axis: Axis) -> tuple[int, str]:
    """Height and shapes."""
    steps, lanes = trace.steps, _lanes(trace.lines)
    num_lanes = max(lanes) + 1
    lane_height = next((height for most, height in _LANE_HEIGHTS if num_lanes <= most), _LEAST_LANE_HEIGHT)
    top = 34
    bars_end = top + num_lanes * lane_height
    shapes = [_title(top, f"sequences ({len(trace.lines)})")]
    shapes += [
        _bar(line, axis, top + lane * lane_height, lane_height) for line, lane in zip(trace.lines, lanes, strict=True)
    ]
    areas: tuple[tuple[str, int, float, list[tuple[str, Callable[[TracedStep], float]]]], ...] = (
        (
            "tokens a step",
            90,
            max(step.prefill_tokens + step.decode_tokens for step in steps),
            [("decode", lambda step: step.decode_tokens), ("prefill", lambda step: step.prefill_tokens)],
        ),
        (
            "KV blocks",
            110,
            max(sum(steps[0].blocks), 1),
            [
                ("owned", lambda step: step.blocks[0]),
                ("limbo", lambda step: step.blocks[2]),
                ("cached", lambda step: step.blocks[1]),
            ],
        ),
        ("queue", 50, max(max(step.queued for step in steps), 1), [("queue", lambda step: step.queued)]),
    )
    y = bars_end
    for title, height, most, series in areas:
        y += _GAP
        shapes.append(_area(steps, axis, title, (y, height), most, series))
        y += height
    return y + 20, _grid(axis, trace, top, y) + "".join(shapes)


def _grid(axis: Axis, trace: Trace, top: int, bottom: int) -> str:
    shapes = []
    for x, label in axis.ticks():
        shapes.append(f'<path d="M{x:.1f} {top}V{bottom}" class="grid"/>')
        shapes.append(f'<text x="{x:.1f}" y="{bottom + 14}" class="faint middle">{label}</text>')
    for start_s, end_s in trace.cuts:
        x = axis.x(start_s)
        shapes.append(f'<rect x="{x:.1f}" y="{top}" width="{_CUT_WIDTH}" height="{bottom - top}" class="cut"/>')
        shapes.append(
            f'<text transform="translate({x + 13:.1f} {bottom - 4}) rotate(-90)" class="faint">'
            f"idle {_seconds(end_s - start_s)}</text>"
        )
    return "".join(shapes)


def _lanes(lines: Sequence[SequenceLine]) -> list[int]:
    """A lane for each line, sorted by their start: the first that is free."""
    free_s: list[float] = []
    lanes = []
    for line in lines:
        lane = next((lane for lane, at_s in enumerate(free_s) if at_s <= line.start_s), len(free_s))
        if lane == len(free_s):
            free_s.append(0.0)
        free_s[lane] = line.end_s
        lanes.append(lane)
    return lanes


def _bar(line: SequenceLine, axis: Axis, y: int, height: int) -> str:
    middle, thickness = y + height / 2, max(height - 3, 3)
    shapes = [f"<g><title>{escape(_told(line))}</title>"]
    first = line.parts[0]
    if line.arrival_s is not None and first.start_s > line.arrival_s:
        shapes.append(f'<path d="M{axis.x(line.arrival_s):.1f} {middle}H{axis.x(first.start_s):.1f}" class="waits"/>')
    for before, after in pairwise(line.parts):
        if axis.x(after.start_s) - axis.x(before.end_s) > 1:
            is_lost = any(before.start_s < at_s <= after.start_s for at_s in line.preempted_s)
            kind = "waits" if is_lost else "stalled"
            shapes.append(
                f'<path d="M{axis.x(before.end_s):.1f} {middle}H{axis.x(after.start_s):.1f}" class="{kind}"/>'
            )
    shapes += [_rect(part, axis, y + 1, thickness) for part in line.parts]
    shapes += [f'<path d="M{axis.x(at_s):.1f} {y}v{height - 1}" class="lost"/>' for at_s in line.preempted_s]
    end = axis.x(line.end_s)
    if not line.is_well:
        shapes.append(f'<path d="M{end + 3:.1f} {middle - 4}l7 8m0 -8l-7 8" class="bad"/>')
    start, solid = axis.x(first.start_s), _solid(line, axis)
    label = _cut(line.request_id) or line.name
    if height >= 14 and len(label) * _LETTER_WIDTH < solid - start - 6:
        shapes.append(f'<text x="{start + 4:.1f}" y="{middle + 3.5}" class="on">{escape(label)}</text>')
    return "".join(shapes) + "</g>"


def _solid(line: SequenceLine, axis: Axis) -> float:
    """Return where the bar is interrupted first."""
    for before, after in pairwise(line.parts):
        if axis.x(after.start_s) - axis.x(before.end_s) > 1:
            return axis.x(before.end_s)
    return axis.x(line.end_s)


def _rect(part: StepRun, axis: Axis, y: int, height: int) -> str:
    x = axis.x(part.start_s)
    width = max(axis.x(part.end_s) - x, 0.8)
    kind = "decode" if part.is_decode else "prefill chunk"
    steps = f"step {part.first_step}" + (f" to {part.last_step}" if part.last_step > part.first_step else "")
    told = f"{part.num_tokens} tokens in {steps}, {_seconds(part.end_s - part.start_s)}"
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" class="{kind}">'
        f"<title>{kind.partition(' ')[0]}: {told}</title></rect>"
    )


def _area(
    steps: Sequence[TracedStep],
    axis: Axis,
    title: str,
    place: tuple[int, int],
    most: float,
    series: Iterable[tuple[str, Callable[[TracedStep], float]]],
) -> str:
    """Series on top of each other; `place` is the panel's top and its height, `most` the value at its top."""
    top, height = place
    bottom, right = top + height, axis.x(steps[-1].end_s)
    shapes = [
        _title(top, title),
        f'<path d="M{_LEFT} {top}H{right:.1f}M{_LEFT} {bottom}H{right:.1f}" class="grid"/>',
        f'<text x="{_LEFT - 6}" y="{top + 9}" class="faint end">{most:,.0f}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" class="faint end">0</text>',
    ]
    # The time between two steps is the earlier one's, but where it is cut.
    ends = [
        axis.x(step.end_s if axis.is_cut(step.end_s, after.start_s) else after.start_s)
        for step, after in pairwise(steps)
    ]
    ends.append(right)
    floor = [0.0] * len(steps)
    for name, value in series:
        ceiling = [low + value(step) for low, step in zip(floor, steps, strict=True)]
        path = []
        for step, end, low, high in zip(steps, ends, floor, ceiling, strict=True):
            if high > low:
                x = axis.x(step.start_s)
                under, over = bottom - low / most * height, bottom - high / most * height
                path.append(f"M{x:.1f} {under:.1f}H{end:.1f}V{over:.1f}H{x:.1f}z")
        shapes.append(f'<path d="{"".join(path)}" class="{name}"><title>{name}</title></path>')
        floor = ceiling
    return "".join(shapes)


def _title(top: int, text: str) -> str:
    return f'<text x="{_LEFT}" y="{top - 7}" class="title">{escape(text)}</text>'


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LETTERS else text[: _MAX_LETTERS - 1] + "…"


def _told(line: SequenceLine) -> str:
    """All that is known of a sequence, on lines."""
    parts = [line.request_id or "a request that began before", f"sequence {line.name}"]
    if line.request_id:
        parts.append(f"{line.prompt_tokens} prompt tokens, {line.known_tokens} of them known")
    parts.append(f"computed {line.tokens(decode=False)} in prefill, {line.tokens(decode=True)} in decode")
    if line.arrival_s is not None:
        parts.append(f"waited {_seconds(line.parts[0].start_s - line.arrival_s)}")
    if line.preempted_s:
        parts.append(f"preempted {len(line.preempted_s)} times")
    return "\n".join([*parts, f"ended {line.ended}" if line.ended else "goes on"])


def _summary(trace: Trace) -> str:
    steps, head = trace.steps, trace.head
    prefill, decode = sum(step.prefill_tokens for step in steps), sum(step.decode_tokens for step in steps)
    preempted = sum(len(line.preempted_s) for line in trace.lines)
    parts = [
        f"steps {steps[0].number} to {steps[-1].number}",
        f"{_seconds(steps[-1].end_s - steps[0].start_s)}",
        f"{prefill:,} tokens prefilled, {decode:,} decoded",
        f"{preempted} preemptions",
        f"{head['device']}, {head['num_blocks']:,} KV blocks of {head['block_size']} tokens",
        f"at most {head['max_num_seqs']} sequences and {head['max_num_batched_tokens']:,} tokens a step",
    ]
    if trace.num_missing:
        parts.append(f"{trace.num_missing} lines are missing")
    return " · ".join(parts)


def _seconds(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
