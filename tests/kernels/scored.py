"""Log-probabilities that rows ask for, and their records by sorting the log-softmax in float64."""

from __future__ import annotations

import torch

from photon_grpc.kernels.sampling.logprobs import MAX_BEST, MAX_GIVEN, LogprobMetadata

#: (id, logprob, rank)
Record = tuple[int, float, int]
#: N best and G given ids of the slots 0, 1, ...
ASKED = ((-1, 0), (MAX_BEST, 0), (0, 0), (5, MAX_GIVEN), (1, 3), (2, 0), (-1, 0))


def asking(num_rows: int, num_columns: int, device: str = "cpu") -> LogprobMetadata:
    """Return rows at slots in another order; padding is slot 0."""
    given = torch.randint(0, num_columns, (len(ASKED), MAX_GIVEN), dtype=torch.int32)
    num_best, num_given = torch.tensor(ASKED).T.contiguous()
    slots = torch.tensor([(3, 1, 4, 2, 0, 5, 6)[row % 7] for row in range(num_rows)])
    return LogprobMetadata(*(each.to(device) for each in (slots, num_best, num_given, given)))


def sorted_scores(logits: torch.Tensor, ids: torch.Tensor, asked: LogprobMetadata) -> list[list[Record]]:
    """Return the records of each row; none for a row that asks for none."""
    logprobs = logits.double().log_softmax(-1)
    rows = []
    for row, slot in enumerate(asked.slots.tolist()):
        num_best, num_given = int(asked.num_best[slot]), int(asked.num_given[slot])
        order = sorted(range(logits.shape[1]), key=lambda at, row=row: (-float(logits[row, at]), at))  # type: ignore[misc]
        wanted = [max(int(ids[row]), 0), *order[: max(num_best, 0)], *asked.given[slot, :num_given].tolist()]
        ranks = [1 + int((logits[row] > logits[row, at]).sum()) for at in wanted]
        found = zip(wanted, logprobs[row, wanted].tolist(), ranks, strict=True)
        rows.append(list(found) if num_best >= 0 else [])
    return rows


def assert_equal_records(records: torch.Tensor, expected: list[list[Record]]) -> None:
    logprobs = records.cpu().view(torch.float32)[:, :, 1]
    for row, wanted in enumerate(expected):
        ids, _, ranks = records[row, : len(wanted)].T.tolist()
        assert ids == [token for token, _, _ in wanted]
        assert ranks == [rank for _, _, rank in wanted]
        theirs = torch.tensor([logprob for _, logprob, _ in wanted])
        torch.testing.assert_close(logprobs[row, : len(wanted)], theirs, atol=1e-5, rtol=1e-6)
