"""Scores on a terminal: a line for each token, behind the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from photon_grpc.client import Candidate, Delta, Start, TokenScore


class Scores:
    """Those of a stream until its text has been written."""

    def __init__(self) -> None:
        self._outputs: dict[int, list[TokenScore]] = {}

    def add(self, delta: Delta) -> None:
        if delta.scores:
            self._outputs.setdefault(delta.index, []).extend(delta.scores)

    def print(self, start: Start | None, out: TextIO) -> None:
        """Nothing where none were asked for."""
        if start is not None and start.prompt_scores:
            _print("prompt", start.prompt_scores, out)
        for index, scores in sorted(self._outputs.items()):
            _print(f"output {index}", scores, out)


def _print(title: str, scores: Sequence[TokenScore], out: TextIO) -> None:
    print(f"── {title}: logprob, rank, token · candidates ──", file=out)
    for line in lines(scores):
        print(line, file=out)


def lines(scores: Sequence[TokenScore]) -> Iterator[str]:
    """`  -0.693    1  'def'  ·  'def' -0.693  'class' -1.204`"""
    for score in scores:
        logprob = "" if score.logprob is None else f"{score.logprob:.3f}"
        rank = score.rank or ""
        others = "  ".join(f"{_token(each)} {each.logprob:.3f}" for each in score.candidates)
        yield f"{logprob:>9} {rank:>6}  {_token(score)}" + (f"  ·  {others}" if others else "")


def _token(score: TokenScore | Candidate) -> str:
    """As Python spells it, so that nothing in it steers the terminal; its id where it has no bytes."""
    return repr(score.token_bytes.decode(errors="replace")) if score.token_bytes else str(score.token_id)
