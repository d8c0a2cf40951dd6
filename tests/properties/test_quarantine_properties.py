"""Engines that some requests crash, one after the other, and callers that retry what was lost.

Each such request causes at most two crashes and is then refused. All others get their outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.batch import Batch
from photon_grpc.core.ports import Pending
from photon_grpc.core.sequence import Sequence
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting, windows
from tests.examples import examples


class Died(Exception):
    """The engine's process."""


@dataclass
class Asked:
    prompt: list[int]
    max_tokens: int
    num_outputs: int
    #: The engine dies when it computes a row of so many ids of the output; more than max_tokens: never.
    fatal_at: int
    #: Whether its caller continues from what was sent, rather than from the beginning.
    continues: bool
    handle: int = -1
    #: Sent by engines that died.
    sent: list[int] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    refused: str = ""

    @property
    def is_poison(self) -> bool:
        return self.fatal_at < self.max_tokens

    @property
    def is_over(self) -> bool:
        return bool(self.refused) or len(self.outputs) == self.num_outputs


class Mortal:
    """An engine, and what it is served with when the one before has died."""

    def __init__(self, setting: Setting, before: Mortal | None = None) -> None:
        old = before.harness.recorder if before else None
        self.harness = Harness(setting, None, old.in_flight() if old else {}, old.known if old else b"")
        self._sent: list[Asked] = []
        self._submit = self.harness.runner.submit
        self.harness.runner.submit = self._submit_or_die  # type: ignore[method-assign]
        self._fatal: dict[int, int] = {}

    def send(self, ask: Asked) -> None:
        sent = tuple(ask.sent)
        ask.handle = self.harness.add(
            ask.prompt, ask.max_tokens, num_outputs=ask.num_outputs, seed=3, continued_ids=sent
        )
        self._sent.append(ask)
        for index in range(ask.num_outputs):
            self._fatal[ask.handle + index] = ask.fatal_at

    def run(self) -> bool:
        """Return whether it has lived to the end."""
        try:
            self.harness.run()
        except Died:
            return False
        finally:
            self._collect()
        return True

    def _submit_or_die(self, batch: Batch) -> Pending:
        live = self.harness.scheduler.live
        rows = [seq for seq in live.running if seq.slot in batch.slots]
        suspects = {seq.fingerprint for seq in rows if seq in live.isolation.seqs}
        assert not suspects or {seq.fingerprint for seq in rows} == suspects, "a suspect computes beside others"
        if any(_num_drawn(seq) >= self._fatal[seq.handle] for seq in rows):
            raise Died
        return self._submit(batch)

    def _collect(self) -> None:
        for ask in self._sent:
            for index in range(ask.num_outputs):
                outcome = self.harness.outcomes[ask.handle + index]
                if outcome.finished:
                    ask.outputs[index] = ask.sent + outcome.ids
                elif outcome.failed:
                    ask.refused = outcome.failed.reason
            if ask.continues and not ask.is_over:
                ask.sent += self.harness.outcomes[ask.handle].ids


def _num_drawn(seq: Sequence) -> int:
    """Ids of its output before the newest step in flight."""
    *before, _ = seq.flights
    return seq.num_output + sum(flight.may_yield for flight in before)


settings_of = st.builds(
    Setting,
    num_blocks=st.integers(14, 40),
    block_size=st.sampled_from([2, 4]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(2, 40),
    chunked=st.booleans(),
    depth=st.integers(0, 2),
    policy=st.sampled_from(["priority", "fcfs", "static"]),
    fair=st.booleans(),
    windows=windows,
)
#: Prompts differ by their first id, so that a fingerprint belongs to one of them.
asks = st.lists(
    st.tuples(
        st.integers(1, 9), st.integers(1, 9), st.integers(1, 2), st.sampled_from([99, 99, 0, 1, 4]), st.booleans()
    ),
    min_size=1,
    max_size=8,
)


@given(settings_of, asks)
@settings(max_examples=examples(60))
def test_every_poison_costs_two_deaths_at_most_and_nobody_else_his_output(setting, drawn) -> None:  # type: ignore[no-untyped-def]
    asked = [
        Asked([number, *range(length)], max_tokens, num_outputs, fatal_at, continues and num_outputs == 1)
        for number, (length, max_tokens, num_outputs, fatal_at, continues) in enumerate(drawn)
    ]
    num_poisons = sum(ask.is_poison for ask in asked)
    engine, deaths = Mortal(setting), 0
    while True:
        for ask in asked:
            if not ask.is_over:
                engine.send(ask)
        if engine.run():
            break
        deaths += 1
        assert deaths <= 2 * num_poisons
        engine = Mortal(setting, engine)
    assert engine.harness.idle()
    for ask in asked:
        assert ask.refused == ("REQUEST_QUARANTINED" if ask.is_poison else "")
        if not ask.is_poison:
            expected = {i: complete(ask.prompt, ask.max_tokens, seed=3, index=i) for i in range(ask.num_outputs)}
            assert ask.outputs == expected
