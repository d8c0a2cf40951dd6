"""Each answer in a crowded batch of all kinds of requests is that of the request alone."""

from __future__ import annotations

import pytest

from tests.compose.matrix import PLAIN, alone, answer, answers_alone, answers_together, crowded, request
from tests.properties.drawn_requests import complete


@pytest.mark.timeout(400)
def test_every_pair_and_many_triples_answer_as_alone() -> None:
    with alone("cpu") as llm:
        expected = answers_alone(llm)
        plain = [output for one in PLAIN for output in complete(llm, one)]
    refused = [each for each, told in expected.items() if isinstance(told, str)]
    with crowded("cpu") as llm:
        for each, outputs in answers_together(llm, [each for each in expected if each not in refused]):
            assert outputs == (plain if each == ("plain",) else expected[each]), each
        assert [answer(llm, request(each)) for each in refused] == [expected[each] for each in refused]
