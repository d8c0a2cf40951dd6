"""Each answer in a crowded batch of all kinds of requests is that of the request alone, on a GPU and on a CPU.

All compute in float32.
"""

from __future__ import annotations

import pytest

from tests.compose.matrix import PLAIN, alone, answers_alone, answers_together, crowded
from tests.properties.drawn_requests import complete

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(400)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_pair_and_many_triples_answer_as_alone(device: str) -> None:
    with alone(device) as llm:
        expected = answers_alone(llm)
        expected["plain",] = [output for one in PLAIN for output in complete(llm, one)]
    served = [each for each, told in expected.items() if not isinstance(told, str) and each != ("plain",)]
    with crowded("cuda") as llm:
        answered = list(answers_together(llm, served))
    differing = [each for each, outputs in answered if outputs != expected[each]]
    # Rounding decides close calls.
    assert len(differing) <= len(answered) // 100, differing
