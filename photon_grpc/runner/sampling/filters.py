"""top-k, top-p and min-p as one number per row: the smallest logit that is kept.

Order and meaning are those of transformers' warpers: top-k, then top-p over what is left, then min-p. Tokens whose logits are equal are kept
or dropped together.
"""

from __future__ import annotations

import torch


def cutoff(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """float32 [R] from scaled logits float32 [R, V], top_k int64 [R] (-1: off), top_p and min_p float32 [R]."""
    ordered = scaled.sort(dim=-1, descending=True).values
    vocab = ordered.shape[1]
    k = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    kept = torch.arange(vocab, device=scaled.device) < k[:, None]
    probabilities = ordered.masked_fill(~kept, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # The likeliest is always kept; with top_p = 1 rounding in the sum must not drop anything.
    kept &= (before < top_p[:, None]) | (top_p >= 1.0)[:, None]
    num_kept = kept.sum(-1).clamp(min=1)
    smallest = ordered.gather(1, (num_kept - 1)[:, None])[:, 0]
    return torch.maximum(smallest, ordered[:, 0] + min_p.log())
