"""The books of front ends that die: what the engine counted is accounted for or lost, each token once."""

from __future__ import annotations

from photon_grpc.bridge.control import FrontendLost
from photon_grpc.service.lost_tokens import LostTokens, Tokens


def test_what_a_dead_front_end_had_not_accounted_for_is_lost_whoever_tells_first() -> None:
    for engine_is_first in (True, False):
        lost = LostTokens()
        lost.joined(0, 0)
        lost.joined(1, 1)
        if engine_is_first:
            lost.told(FrontendLost(0, 100, 50, 3))
            assert lost.tokens == Tokens()
        lost.ended(0, Tokens(80, 45))
        if not engine_is_first:
            assert lost.tokens == Tokens()
            # The next one in its place is no part of its books.
            lost.joined(0, 2)
            lost.told(FrontendLost(0, 100, 50, 3))
        assert (lost.tokens, lost.num_requests) == (Tokens(20, 5), 3)
        lost.told(FrontendLost(0, 0, 2))
        assert lost.tokens == Tokens(20, 7)


def test_one_that_was_joined_twice_has_one_account() -> None:
    lost = LostTokens()
    lost.joined(0, 0)
    lost.told(FrontendLost(0, 10, 10, 4))
    lost.joined(0, 1)
    lost.ended(0, Tokens(12, 13))
    lost.told(FrontendLost(0, 0, 1))
    assert lost.tokens == Tokens()
    lost.told(FrontendLost(1, 5, 5, 2))
    # The four that it had when it was joined again it has told of itself.
    assert (lost.tokens, lost.num_requests) == (Tokens(3, 3), 2)


def test_an_engines_account_ends_with_it() -> None:
    lost = LostTokens()
    lost.joined(0, 0)
    lost.engine_ended()
    lost.joined(0, 0)
    lost.engine_is_ready(lambda place: Tokens(70, 70))
    lost.ended(0, Tokens(75, 80))
    lost.told(FrontendLost(0, 6, 10, 1))
    assert (lost.tokens, lost.num_requests) == (Tokens(1, 0), 1)
    lost.told(FrontendLost(9, 5, 5))
    assert lost.tokens == Tokens(1, 0)


def test_front_ends_that_die_without_end_are_not_remembered_for_ever() -> None:
    lost = LostTokens()
    for connection in range(3000):
        lost.joined(0, connection)
        lost.told(FrontendLost(connection, 5, 5, 1))
        lost.ended(0, Tokens(4, 4))
    assert (lost.tokens, lost.num_requests) == (Tokens(3000, 3000), 3000)
    assert len(lost._by_connection) == 1024
