"""Quotas of an owner: requests in flight, tokens per minute, and the errors when they are used up."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.core.ask import UNWRITTEN, ConstraintAsk, StopAsk
from photon_grpc.core.quotas import Quotas
from photon_grpc.core.request import FinishReason, OwnerLimits
from photon_grpc.errors import DescriptorSetUnknown, EngineRestarting, PromptTooLong, QuotaExceeded
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.quotas import FrontendQuotas
from tests.frontend.fake_engine import FakeLink, ask, done, frontend


class Tenants:
    def __init__(self) -> None:
        self.keys = {"a": OwnerLimits(2, 600), "b": OwnerLimits(), "slow": OwnerLimits(None, 60)}
        self.now_s = 1000.0
        self.quotas = Quotas(self.keys.get, clock=lambda: self.now_s)


@pytest.fixture
def tenants() -> Tenants:
    return Tenants()


@pytest.fixture
def pair(tenants: Tenants) -> Iterator[tuple[Frontend, FakeLink]]:
    with frontend(quotas=FrontendQuotas(tenants.quotas)) as made:
        yield made


def prompt(num_tokens: int) -> tuple[int, ...]:
    return tuple(range(10, 10 + num_tokens))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 70), st.sampled_from(["enter", "leave", "take"]))))
def test_forgetting_an_owner_does_not_change_its_refusals(turns: list[tuple[int, int, str]]) -> None:
    def history(forgets: bool) -> list[str]:
        now_s, told = 1000.0, []
        quotas = Quotas({str(number): OwnerLimits(2, 60 + number) for number in range(5)}.get, clock=lambda: now_s)
        for number, amount, what in turns:
            now_s += amount
            owner, quotas._max_uses = str(number), 0 if forgets else 1000
            if what == "leave" and quotas.num_running(owner):
                quotas.leave(owner)
            elif what != "leave":
                try:
                    quotas.check_running(owner, None)
                    quotas.check_tokens(owner, amount, None)
                    quotas.take(owner, amount + 20)
                    if what == "enter":
                        quotas.enter(owner)
                except QuotaExceeded as error:
                    told.append(f"{error} {round(error.retry_after_s or -1, 6)}")
        return told

    assert history(forgets=True) == history(forgets=False)


def test_names_of_owners_are_forgotten_in_time(tenants: Tenants) -> None:
    quotas = Quotas(lambda owner: OwnerLimits(2, 600), clock=lambda: tenants.now_s)
    quotas.enter("runs")
    for number in range(1000):
        quotas.check_running(str(number), None)
        quotas.check_tokens(str(number), 10, None)
        quotas.enter(str(number))
        quotas.take(str(number), 10)
        quotas.leave(str(number))
        tenants.now_s += 1.0
        assert len(quotas) <= 64
    assert quotas.num_running("runs") == 1 and "0" not in quotas


def test_a_key_that_is_removed_and_added_again_keeps_its_debt(tenants: Tenants) -> None:
    tenants.quotas.check_tokens("a", 600, None)
    tenants.quotas.take("a", 6000)
    limits = tenants.keys.pop("a")
    tenants.quotas._max_uses = 0
    tenants.quotas.enter("b")
    tenants.keys["a"] = limits
    with pytest.raises(QuotaExceeded):
        tenants.quotas.check_tokens("a", 600, None)


async def test_requests_in_flight_are_counted_per_owner(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    streams = [await front.stream(ask(owner="a")) for _ in range(2)]
    with pytest.raises(QuotaExceeded) as caught:
        await front.stream(ask(owner="a"))
    assert (caught.value.needed, caught.value.limit, caught.value.retry_after_s) == (3, 2, 1.0)
    assert not caught.value.is_final
    others = [await front.stream(ask(owner="b")) for _ in range(2)]
    link.step()
    streams.pop().close()
    streams.append(await front.stream(ask(owner="a")))
    for stream in streams + others:
        stream.close()
        stream.close()
    link.step()
    for stream in [await front.stream(ask(owner="a")) for _ in range(2)]:
        stream.close()


async def unknown() -> ConstraintAsk:
    raise DescriptorSetUnknown("no set has this digest")


async def test_requests_never_sent_are_not_counted(pair: tuple[Frontend, FakeLink], tenants: Tenants) -> None:
    front, link = pair
    tenants.keys["a"] = OwnerLimits(1, 100)
    for _ in range(3):
        with pytest.raises(PromptTooLong):
            await front.stream(ask("x" * 2000, owner="a"))
    link.facts = msgspec.structs.replace(link.facts, has_grammars=True)
    for _ in range(3):
        with pytest.raises(DescriptorSetUnknown):
            await front.stream(ask(prompt(90), owner="a", constraint=UNWRITTEN), unknown)
    facts, link.facts = link.facts, None
    with pytest.raises(EngineRestarting):
        await front.stream(ask(prompt(90), owner="a"))
    link.facts = facts
    (await front.stream(ask(prompt(90), owner="a"))).close()


async def test_prompt_and_delivered_tokens_come_out_of_the_bucket(
    pair: tuple[Frontend, FakeLink], tenants: Tenants
) -> None:
    front, link = pair
    stream = await front.stream(ask(prompt(40), owner="slow"))
    link.step(*[(1, 7)] * 30, finished=(done(1, FinishReason.MAX_TOKENS, 30),))
    assert [update async for update in stream][-1].usage is not None
    with pytest.raises(QuotaExceeded) as caught:  # in debt: 60 - 40 - 30
        await front.stream(ask(prompt(5), owner="slow"))
    assert caught.value.retry_after_s == pytest.approx(11)
    tenants.now_s += 11
    with pytest.raises(QuotaExceeded) as caught:
        await front.stream(ask(prompt(5), owner="slow"))
    assert caught.value.retry_after_s == pytest.approx(4)
    tenants.now_s += 4
    (await front.stream(ask(prompt(5), owner="slow"))).close()
    tenants.now_s += 1e6
    (await front.stream(ask(prompt(60), owner="slow"))).close()
    with pytest.raises(QuotaExceeded):  # a long pause fills one minute's worth, no more
        await front.stream(ask(prompt(1), owner="slow"))


async def test_a_cancelled_request_pays_for_what_it_received(pair: tuple[Frontend, FakeLink], tenants: Tenants) -> None:
    front, link = pair
    stream = await front.stream(ask(prompt(10), owner="slow"))
    link.step(*[(1, 7)] * 20)
    stream.close()
    assert tenants.quotas._level(tenants.quotas._use("slow"), 60) == 30


async def test_a_prompt_above_the_quota_of_a_minute_never_succeeds(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    with pytest.raises(QuotaExceeded) as caught:
        await front.stream(ask(prompt(61), owner="slow"))
    assert (caught.value.needed, caught.value.limit, caught.value.retry_after_s) == (61, 60, None)
    assert caught.value.is_final
    assert not link.adds


@pytest.mark.parametrize(("deadline_s", "is_final"), [(5.0, True), (50.0, False)])
async def test_a_wait_beyond_the_deadline_is_final(tenants: Tenants, deadline_s: float, is_final: bool) -> None:
    tenants.quotas.take("slow", 60)
    with pytest.raises(QuotaExceeded) as caught:
        tenants.quotas.check_tokens("slow", 10, tenants.now_s + deadline_s)
    assert caught.value.is_final is is_final
    assert caught.value.retry_after_s == pytest.approx(10)


async def test_changed_limits_apply_at_once(pair: tuple[Frontend, FakeLink], tenants: Tenants) -> None:
    front, _ = pair
    stream = await front.stream(ask(prompt(50), owner="slow"))
    tenants.keys["slow"] = OwnerLimits(1, 20)
    with pytest.raises(QuotaExceeded):
        await front.stream(ask(owner="slow"))
    del tenants.keys["slow"]
    stream.close()
    tenants.keys["slow"] = OwnerLimits(1, 20)
    tenants.now_s += 60
    (await front.stream(ask(prompt(20), owner="slow"))).close()


async def test_an_output_that_is_over_before_it_is_sent_costs_nothing(
    pair: tuple[Frontend, FakeLink], tenants: Tenants
) -> None:
    front, link = pair
    tenants.keys["a"] = OwnerLimits(1, 600)
    given = front._model.tokenizer.encode("Hello", add_special_tokens=False)  # type: ignore[union-attr]
    over = ask("Say", owner="a", continue_from=given, stop=StopAsk(stop_strings=("Hello",)))
    for _ in range(3):
        assert [update async for update in await front.stream(over)]
    assert not link.adds
    assert tenants.quotas._level(tenants.quotas._use("a"), 600) == 600


async def test_ids_and_text_count_the_same(pair: tuple[Frontend, FakeLink], tenants: Tenants) -> None:
    front, link = pair
    tenants.keys["a"] = OwnerLimits(None, 600)
    (await front.stream(ask("Hello", owner="a"))).close()
    left = tenants.quotas._level(tenants.quotas._use("a"), 600)
    (await front.stream(ask(link.adds[0].request.prompt_ids, owner="a"))).close()
    assert 600 - left == left - tenants.quotas._level(tenants.quotas._use("a"), 600) > 0
