"""Muon for the matrices inside the blocks, AdamW for the embedding and the gains.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces a matrix's momentum by the nearest
semi-orthogonal matrix, found by five Newton–Schulz steps; scaled as in Moonlight (Liu et al. 2025, arXiv:2502.16982)
so that its learning rate and weight decay mean what they mean to AdamW.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from .llama import Llama

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon:
    """Steps all matrices of one shape at once, stacked, so that a small model is not bound by kernel launches."""

    def __init__(self, matrices: list[torch.nn.Parameter], momentum: float, weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        self.groups = [
            (group, torch.zeros(len(group), *shape, device=group[0].device)) for shape, group in by_shape.items()
        ]
        self.momentum, self.weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for matrices, velocity in self.groups:
            gradients = torch.stack([matrix.grad for matrix in matrices])
            velocity.lerp_(gradients, 1 - self.momentum)
            direction = orthogonalise(gradients.lerp(velocity, self.momentum))
            scale = 0.2 * max(velocity.shape[-2:]) ** 0.5
            torch._foreach_mul_(matrices, 1 - learning_rate * self.weight_decay)
            torch._foreach_add_(matrices, list(direction.unbind(0)), alpha=-learning_rate * scale)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """[n, rows, columns] → about U Vᵀ of each one's singular value decomposition, in float32."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Both optimizers behind one step; gradients are cleared after it."""

    def __init__(self, model: Llama, weight_decay: float) -> None:
        inside = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
        gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        embedding = model.model.embed_tokens.weight
        self.muon = Muon(inside, momentum=0.95, weight_decay=weight_decay)
        groups = [{"params": [embedding], "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=embedding.is_cuda)
        self.model = model

    def step(self, learning_rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.muon.step(learning_rate)
        self.adamw.step()
        self.model.zero_grad(set_to_none=True)
