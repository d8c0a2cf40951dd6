"""Log-probabilities on a terminal: a line for each token, after the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from photon_grpc.client import Candidate, Delta, Start, TokenScore


class Scores:
    """The log-probabilities of a stream, collected until its text has been written."""

    def __init__(self) -> None:
        self._outputs: dict[int, list[TokenScore]] = {}

    def add(self, delta: Delta) -> None:
        if delta.scores:
            self._outputs.setdefault(delta.index, []).extend(delta.scores)

    def print(self, start: Start | None, out: TextIO) -> None:
        """Print them, if any were requested."""
        if start is not None and start.prompt_scores:
            _print("prompt", start.prompt_scores, out)
        for index, scores in sorted(self._outputs.items()):
            _print(f"output {index}", scores, out)


def _print(title: str, scores: Sequence[TokenScore], out: TextIO) -> None:
    print(f"── {title}: logprob, rank, token · candidates ──", file=out)
    for line in lines(scores):
        print(line, file=out)


def lines(scores: Sequence[TokenScore]) -> Iterator[str]:
    """Yield lines such as `  -0.693    1  'def'  ·  'def' -0.693  'class' -1.204`."""
    for score in scores:
        logprob = "" if score.logprob is None else f"{score.logprob:.3f}"
        rank = score.rank or ""
        others = "  ".join(f"{_token(each)} {each.logprob:.3f}" for each in score.candidates)
        yield f"{logprob:>9} {rank:>6}  {_token(score)}" + (f"  ·  {others}" if others else "")


def _token(score: TokenScore | Candidate) -> str:
    """Return the token as Python's repr, which cannot control the terminal; its id if it has no bytes."""
    return repr(score.token_bytes.decode(errors="replace")) if score.token_bytes else str(score.token_id)
