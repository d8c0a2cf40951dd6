"""Play stories with drafts for a while, and count them.

    python -m tests.runner.stories [--minutes 20] [--seed 1] [--small 0.8]

As tests/properties/test_speculation_properties.py, without a library that looks for smaller failures, so that sessions
may add up. Several stories have the same requests, which are computed alone once. An output that differs from the one
of its request alone, without drafts, ends it with an error. The last line of each minute is the count so far. Most are
played by the embedded draft model, which has a quarter of the layers; `--small 0` leaves it out.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from benchmarks.bits.company import Scenario
from tests.runner.drafters import KINDS, Story, loaded, play

#: A model for each kind of story is loaded again and again otherwise.
_STORIES_A_MODEL = 16
#: So many sets of requests are played by the stories of all models, in turns; a new one comes now and then.
_SETS = 48


def scenario(rng: random.Random) -> Scenario:
    if rng.random() < 0.25:
        tokens = rng.choice((16, 2048))
        return Scenario("story", company=rng.choice((1, 3, 8, 16)), max_num_batched_tokens=tokens, contiguous=True)
    return Scenario(
        "story",
        company=rng.choice((1, 3, 8, 16)),
        max_num_batched_tokens=rng.choice((5, 16, 40, 2048)),
        prefix_caching=rng.random() < 0.5,
        passes=rng.choice((1, 1, 2)),
        kv_requests=rng.choice((None, 1, 2)),
        crowded=rng.random() < 0.5,
        policy=rng.choice(("priority", "fcfs", "static")),
        continuations=rng.choice((0, 0, 2)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", type=float, default=0.8, help="the share of stories of the small model")
    args = parser.parse_args()
    rng, end_s = random.Random(args.seed), time.monotonic() + 60 * args.minutes
    sets = [rng.randrange(2**32) for _ in range(_SETS)]
    told_s = time.monotonic()
    stories: Counter[str] = Counter()
    outputs: Counter[str] = Counter()
    while time.monotonic() < end_s:
        kind, drafts, depth = rng.choice(KINDS), rng.choice((1, 3, 5, 7)), rng.randrange(2)
        is_small = rng.random() < args.small
        sets[rng.randrange(_SETS)] = rng.randrange(2**32)
        for _ in range(_STORIES_A_MODEL):
            story = Story(rng.randrange(2**32), scenario(rng), kind, drafts, depth, may_be_small=is_small)
            named = f"{kind}, {'small' if story.is_small else 'embedded'}"
            try:
                outputs[named] += play(story, asking := rng.choice(sets))[0]
            except Exception:
                print(f"not as without drafts: {story}, requests {asking}", flush=True)
                raise
            stories[named] += 1
        loaded.cache_clear()
        if time.monotonic() > told_s + 60.0:
            told_s = time.monotonic()
            print(f"{stories.total()} stories, {outputs.total()} outputs, 0 differ so far", flush=True)
    for kind, count in stories.items():
        print(f"{kind}: {count} stories, {outputs[kind]} outputs")
    print(f"{stories.total()} stories, {outputs.total()} outputs, 0 differ")


if __name__ == "__main__":
    main()
