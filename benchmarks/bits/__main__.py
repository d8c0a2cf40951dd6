"""Compare every request's ids and logprobs, bit for bit, with those it has alone: in companies, chunks, caches, ….

    python -m benchmarks.bits [--shape 1b] [--unique 1000] [--requests 10000] [--time-limit-s 500] [--out DIR]
    python -m benchmarks.bits --shape demo --unique 60 --requests 300

`--unique` random requests are first computed alone: one row a step, the whole prompt at once, nothing cached. Each
scenario then computes the same requests (or its share of them) in another way, on models loaded with different flags,
until `--requests` outputs are compared. What is printed: outputs compared, equal and different by scenario; by what was
drawn for a request and how it was computed; and by the kind of step that computed the first token that differs. Then
prompt_logprobs over prompt + output are compared with the logprobs given while generating. `--llm` and `--served` send
some of the requests through LLM and through gRPC. Files in --out: bits-SHAPE.json.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes, workloads
from benchmarks.bits import interfaces
from benchmarks.bits.company import Company, Outcome, Scenario
from benchmarks.bits.compare import Reference, Report, Tally, digest
from benchmarks.bits.drafters import head, shorter
from benchmarks.bits.requests import Drawn, Limits, draw_requests, request_of
from benchmarks.bits.scenarios import ALONE, INSTANCES, Instance, more
from benchmarks.engine import config_of
from benchmarks.known_answers import Key, KnownAnswers
from benchmarks.saved import add_save_flag, saved
from benchmarks.service import model_flags
from photon_grpc.compose.assemble import Assembled, assemble
from photon_grpc.core.logprobs import RECORD
from photon_grpc.runner.model_runner import ModelRunner

#: Seconds that are kept for what follows the scenarios.
_REST_S = 15.0


class Clock:
    """The time that is left."""

    def __init__(self, limit_s: float) -> None:
        self._begin_s = time.monotonic()
        self.stop_s = self._begin_s + limit_s

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._begin_s

    @property
    def left_s(self) -> float:
        return self.stop_s - time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{self.spent_s:6.1f} s] {text}", flush=True)


class Run:
    """One shape: its requests, what they are alone, and what differs."""

    def __init__(self, args: argparse.Namespace, flags: Sequence[str], clock: Clock) -> None:
        self._args = args
        self._flags = tuple(flags)
        self.clock = clock
        self.drawn: list[Drawn] = []
        self.reference: Reference = {}
        self.report = Report([], {})
        #: Of prompt_logprobs over prompt + output: outputs, those that differ, first positions.
        self.rescored: tuple[int, int, list[int]] = (0, 0, [])
        self.device = ""

    def all(self) -> None:
        """Compute the solitary run and as many scenarios as the time allows."""
        wanted = [each for each in INSTANCES if not self._args.instance or each.name in self._args.instance]
        if workloads.SHAPES.get(self._args.shape, {}).get("sliding_window"):
            # Windows have no contiguous layout.
            wanted = [each for each in wanted if not any(scenario.contiguous for scenario in each.scenarios)]
        for number, instance in enumerate(wanted):
            if self.clock.left_s < _REST_S:
                self.clock.say(f"not run, no time is left: {instance.name}")
                continue
            self._all_on(instance, is_first=not number, parts=len(wanted) - number)
            # Only now nothing refers to the model.
            gc.collect()
            torch.cuda.empty_cache()
        for name, interface, count in (
            ("LLM", interfaces.through_llm, self._args.llm),
            ("gRPC", interfaces.through_grpc, self._args.served),
        ):
            if count and self.reference and self.clock.left_s > _REST_S:
                self._through(name, interface, count)

    def _through(self, name: str, interface: Callable[[Sequence[str]], Any], count: int) -> None:
        """Send some of the requests through the front end."""
        firsts = {number: outcome.ids for (number, output), outcome in self.reference.items() if not output}
        asked = interfaces.sample(self.drawn, firsts, count, random.Random(self._args.seed))
        with interface([*self._flags, "--max-num-seqs", str(self._args.rows), *self._args.flags]) as send:
            outcomes, seconds = interfaces.all_at_once(send, asked)
        for outcome in outcomes:
            number, own = outcome.index, self.reference[outcome.index, outcome.output]
            outcome.prompt_records = interfaces.as_computed(outcome, own, self.reference[number, 0])
        tally = Tally(name, "64 callers", seconds=seconds)
        self.report.add(tally, outcomes, [])
        self.clock.say(f"through {name}: {tally.compared} outputs, {tally.differ} differ {dict(tally.kinds) or ''}")

    def _all_on(self, instance: Instance, *, is_first: bool, parts: int) -> None:
        """Run the scenarios of one loaded model; the first one also computes the solitary run."""
        assembled = self.load(instance)
        try:
            if is_first:
                self.alone(assembled)
            if not self.reference:
                return
            if instance.acceptance is not None:
                assert isinstance(assembled.runner, ModelRunner)
                KnownAnswers(assembled.runner, self._answers(), instance.acceptance)
            self._rounds(assembled, instance, parts)
            if is_first:
                self._rescore(assembled)
            if is_first or parts == 1:
                self._fill(assembled, instance, parts)
        finally:
            assembled.runner.close()

    def _answers(self) -> dict[Key, list[int]]:
        """Return the outputs of the solitary run."""
        return {
            Key(self.drawn[number].prompt, self.drawn[number].options["seed"], output): outcome.ids
            for (number, output), outcome in self.reference.items()
        }

    def load(self, instance: Instance) -> Assembled:
        rows = () if "--max-num-seqs" in instance.flags else ("--max-num-seqs", str(self._args.rows))
        begin_s = time.monotonic()
        drafters = {"{shorter}": shorter, "{head}": head}
        own = [str(drafters[flag](self._flags)) if flag in drafters else flag for flag in instance.flags]
        assembled = assemble(config_of([*self._flags, *rows, *own, *self._args.flags]), lambda *_: None)
        facts = assembled.facts
        self.device = facts.device
        self.clock.say(
            f"## {instance.name}: {facts.device}, {facts.dtype}, kernels {facts.kernels}, {facts.num_blocks} blocks of "
            f"{facts.kv.block_size}, loaded in {time.monotonic() - begin_s:.1f} s, flags {' '.join(instance.flags)}"
        )
        return assembled

    def alone(self, assembled: Assembled) -> None:
        facts = assembled.facts
        limits = Limits(
            facts.vocab_size,
            min(facts.max_model_len, 3072),
            facts.has_grammars,
            *self._args.outputs,
            usual_prompt=self._args.prompt,
        )
        self.drawn = draw_requests(self._args.unique, limits, self._args.seed)
        begin_s = time.monotonic()
        reference: dict[tuple[int, int], Outcome] = {}
        # In parts, so that what is complete is kept when the time is over.
        for first in range(0, len(self.drawn), 50):
            part = [(number, self.drawn[number], ()) for number in range(first, min(first + 50, len(self.drawn)))]
            if time.monotonic() - begin_s > self._args.alone_s:
                self.clock.say(f"the solitary run is cut after {first} requests")
                break
            try:
                outcomes, _ = self._outcomes(assembled, ALONE, part)
            except TimeoutError:
                self.clock.say(f"no time is left: the solitary run is cut after {first} requests")
                break
            reference |= {(outcome.index, outcome.output): outcome for outcome in outcomes}
        self.reference = reference
        self.report = Report(self.drawn, reference)
        tokens = sum(len(outcome.ids) for outcome in reference.values())
        self.clock.say(
            f"alone: {len(reference)} outputs, {tokens} ids, {time.monotonic() - begin_s:.1f} s, digest {self.digest()}"
        )

    def digest(self) -> str:
        """Of everything that the solitary run gave, to compare replicas and kinds of devices."""
        every = [digest(outcome) for _, outcome in sorted(self.reference.items())]
        return hashlib.sha256("".join(every).encode()).hexdigest()[:24]

    def _outcomes(
        self,
        assembled: Assembled,
        scenario: Scenario,
        asked: Sequence[tuple[int, Drawn, tuple[int, ...]]],
        seed: int | None = None,
    ) -> tuple[list[Outcome], Company]:
        longest = max(len(drawn.prompt) + drawn.options["max_tokens"] for _, drawn, _ in asked)
        company = Company(assembled, scenario, longest, self._args.seed if seed is None else seed)
        outcomes: list[Outcome] = []
        try:
            for _ in range(scenario.passes):
                outcomes += company.run(asked, self.clock.stop_s)
        finally:
            company.close()
        return outcomes, company

    def _rounds(self, assembled: Assembled, instance: Instance, parts: int) -> None:
        """Run the scenarios of a model, and run them again in its part of the time that is left."""
        end_s = time.monotonic() + self.clock.left_s / parts
        for number in range(self._args.rounds):
            for scenario in instance.scenarios:
                if not number or time.monotonic() < end_s:
                    self._try(assembled, instance, scenario, number)

    def _try(self, assembled: Assembled, instance: Instance, scenario: Scenario, number: int = 0) -> None:
        """Run a scenario unless the time is over, and count what differs; `number`: of the companies it has."""
        if self.clock.left_s < _REST_S or (self._args.scenario and scenario.name not in self._args.scenario):
            return
        asked = self._asked(scenario)
        if not asked:
            return
        begin_s = time.monotonic()
        try:
            outcomes, company = self._outcomes(assembled, scenario, asked, self._args.seed + number)
        except TimeoutError:
            self.clock.say(f"cut, no time is left: {scenario.name}")
            return
        tally = self.report.tally(instance.name, scenario.name)
        tally.seconds += time.monotonic() - begin_s
        self.report.add(tally, outcomes, company.recorder.sizes)
        self.clock.say(
            f"{scenario.name}: {tally.compared} outputs, {tally.differ} differ {dict(tally.kinds) or ''} "
            f"({tally.steps} steps to {tally.most_rows} rows, {tally.preempted} preempted, {tally.cached} with "
            f"a cached prefix, {tally.seconds:.1f} s)"
        )

    def _asked(self, scenario: Scenario) -> list[tuple[int, Drawn, tuple[int, ...]]]:
        """Return the scenario's share of the requests in an order of its own; continuations instead of whole ones."""
        rng = random.Random(f"{self._args.seed} {scenario.name}")
        numbers = sorted({number for number, _ in self.reference})
        if scenario.only == "plain":
            numbers = [number for number in numbers if self.drawn[number].is_plain]
        numbers = rng.sample(numbers, max(1, round(scenario.share * len(numbers))) if numbers else 0)
        if not scenario.continuations:
            return [(number, self.drawn[number], ()) for number in numbers]
        asked = []
        for number in numbers:
            ids = self.reference[number, 0].ids
            ats = range(1, len(ids))
            some = ats if scenario.continuations < 0 else rng.sample(ats, min(scenario.continuations, len(ats)))
            asked += [(number, self.drawn[number], tuple(ids[:at])) for at in some]
        rng.shuffle(asked)
        return asked

    def _fill(self, assembled: Assembled, instance: Instance, parts: int) -> None:
        """Compute everything together again until enough is compared; the last model takes what is missing."""
        for seed in range(1, 1000):
            wanted = self._args.requests // parts if parts > 1 else self._args.requests
            is_late = self.clock.left_s < (self._args.time_limit_s / 2 if parts > 1 else 2 * _REST_S)
            if self.report.num_compared >= wanted or is_late or self._args.scenario:
                return
            self._try(assembled, instance, more(seed + 100 * parts))

    def _rescore(self, assembled: Assembled) -> None:
        """Compare prompt_logprobs over prompt + output with the logprobs given while generating."""
        if self.clock.left_s < _REST_S:
            return
        scored = [
            (outcome, self.drawn[outcome.index])
            for outcome in self.reference.values()
            if "logprobs" in self.drawn[outcome.index].options
            and "score_token_ids" not in self.drawn[outcome.index].options
        ]
        if not scored:
            return
        asked = []
        for outcome, drawn in scored:
            options = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": drawn.options["logprobs"]}
            asked.append((len(asked), Drawn((*drawn.prompt, *outcome.ids), options), ()))
        try:
            found, _ = self._outcomes(assembled, Scenario("prompt_logprobs of outputs"), asked)
        except TimeoutError:
            return
        firsts = []
        for again in found:
            outcome, drawn = scored[again.index]
            size = request_of(drawn, "").logprobs.num_records * RECORD.size
            tail = again.prompt_records[len(again.prompt_records) - len(outcome.records) :]
            if tail != outcome.records:
                pairs = enumerate(zip(tail, outcome.records, strict=False))
                # One that failed has no records.
                at = next((at for at, (a, b) in pairs if a != b), len(tail))
                firsts.append(at // size)
        self.rescored = len(found), len(firsts), firsts
        self.clock.say(f"prompt_logprobs of prompt + output: {len(found)} outputs, {len(firsts)} differ")

    def tables(self) -> str:
        outputs, differ, _ = self.rescored
        report = self.report
        summary = (
            f"{report.num_compared} outputs compared with the solitary run of {len(self.reference)} outputs of "
            f"{len({number for number, _ in self.reference})} requests: {report.num_compared - report.num_different} "
            f"equal, {report.num_different} differ. prompt_logprobs over prompt + output: {outputs} outputs, "
            f"{differ} differ. Digest of the solitary run: {self.digest()}."
        )
        parts = [summary, report.scenario_table()]
        if report.num_different:
            parts += [report.step_table(), report.trait_table()]
        return "\n\n".join(parts)

    def facts(self) -> dict[str, Any]:
        """What is written to the file."""
        return {
            "shape": self._args.shape,
            "device": self.device,
            "command": sys.argv[1:],
            "compared": self.report.num_compared,
            "differ": self.report.num_different,
            "rescored": self.rescored,
            "digest": self.digest(),
            "tallies": [vars(tally) for tally in self.report.tallies],
            "traits": dict(self.report.traits),
            "steps": dict(self.report.steps),
        }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*workloads.SHAPES, *shapes.UNUSUAL, "demo"], default="1b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--unique", type=int, default=1000, help="different requests")
    parser.add_argument("--requests", type=int, default=10_000, help="outputs to compare")
    parser.add_argument("--outputs", type=int, nargs=2, default=(16, 64), metavar=("MIN", "MAX"), help="ids an output")
    parser.add_argument("--prompt", type=int, default=600, help="tokens of most prompts, at most")
    parser.add_argument("--rows", type=int, default=300, help="rows of a step, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1, help="how often each scenario runs, in other companies")
    parser.add_argument("--time-limit-s", type=float, default=500.0)
    parser.add_argument("--alone-s", type=float, default=200.0, help="most seconds of the solitary run")
    parser.add_argument("--llm", type=int, default=0, metavar="N", help="requests to send through LLM as well")
    parser.add_argument("--served", type=int, default=0, metavar="N", help="requests to send through gRPC as well")
    parser.add_argument("--instance", nargs="*", default=[], help="only these")
    parser.add_argument("--scenario", nargs="*", default=[], help="only these")
    parser.add_argument("--out", type=Path, help="a directory for bits-SHAPE.json")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    args = parser.parse_args(argv)
    least, most = args.outputs
    if not 1 <= least <= most:
        parser.error(f"--outputs: MIN must be at least 1 and at most MAX; got {least} {most}")
    return args


def main() -> int:
    args = arguments()
    clock = Clock(args.time_limit_s)
    workloads.SHAPES.update(shapes.UNUSUAL)
    if args.layers:
        workloads.SHAPES[args.shape] = workloads.SHAPES[args.shape] | {"num_hidden_layers": args.layers}
    with saved(args.save), model_flags(args.shape) as flags:
        print(f"{args.shape}; CUBLAS_WORKSPACE_CONFIG={os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}", flush=True)
        run = Run(args, flags, clock)
        run.all()
        if not run.report.num_compared:
            print(f"nothing was compared in {args.time_limit_s:g} s: raise --time-limit-s", file=sys.stderr)
            return 1
        print(f"\n{run.tables()}", flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        name = f"bits-{args.shape.replace('/', '-')}.json"
        (args.out / name).write_text(json.dumps(run.facts(), indent=1, default=list))
    return int(bool(run.report.num_different or run.rescored[1]))


if __name__ == "__main__":
    sys.exit(main())
