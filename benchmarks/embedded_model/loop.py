"""Fits one Llama to a stream of token ids, alone or on a teacher's logits; keeps the best held-out weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .llama import Llama, num_parameters
from .optimizer import Optimizer


@dataclass(frozen=True)
class FitOptions:
    """How one model is fitted, until time.monotonic() says `ends_at`; compilation is part of the time."""

    ends_at: float
    learning_rate: float
    weight_decay: float
    teacher_weight: float = 0.0
    batch_tokens: int = 65536
    short_length: int = 1024
    long_length: int = 4096
    long_every: int = 6
    warmup: float = 0.05
    evaluations: int = 16
    seed: int = 0
    compile: bool = False


class TokenStream:
    """Documents in a new order every epoch, laid end to end and cut into batches of equal token count."""

    def __init__(self, documents: list[np.ndarray], batch_tokens: int, seed: int, device: torch.device) -> None:
        self.documents, self.batch_tokens, self.device = documents, batch_tokens, device
        self.rng = np.random.default_rng(seed)
        self.tokens_per_epoch = sum(map(len, documents))
        self._batches = self._cut()

    def next(self, length: int) -> tuple[Tensor, Tensor]:
        """ids and labels, int64 [batch_tokens / length, length]."""
        chunk = next(self._batches)
        return chunk[:-1].view(-1, length), chunk[1:].view(-1, length)

    def _cut(self) -> Iterator[Tensor]:
        while True:
            order = self.rng.permutation(len(self.documents))
            stream = np.concatenate([self.documents[index] for index in order]).astype(np.int32)
            while len(stream) <= self.batch_tokens:
                stream = np.concatenate([stream, stream])
            on_device = torch.from_numpy(stream).to(self.device)
            for start in range(0, len(stream) - self.batch_tokens, self.batch_tokens):
                yield on_device[start : start + self.batch_tokens + 1].long()


def fit(model: Llama, documents: list[np.ndarray], held_out: Tensor, options: FitOptions, teacher: Llama | None) -> str:
    """Trains `model` in place and leaves the weights with the lowest held-out loss in it; returns a summary line."""
    device = next(model.parameters()).device
    stream = TokenStream(documents, options.batch_tokens, options.seed, device)
    optimizer = Optimizer(model, options.weight_decay)
    loss_of = _compiled_loss(model, teacher, stream, options)
    print(f"  {num_parameters(model):,} parameters, {stream.tokens_per_epoch:,} tokens an epoch", flush=True)
    best, best_state = math.inf, {}
    started, step, progress, next_report = time.monotonic(), 0, 0.0, 0.0
    while progress < 1.0:
        progress = (time.monotonic() - started) / max(options.ends_at - started, 1e-9)
        length = options.long_length if step % options.long_every == options.long_every - 1 else options.short_length
        loss = loss_of(*stream.next(length))
        loss.backward()
        optimizer.step(options.learning_rate * learning_rate_factor(progress, options.warmup))
        step += 1
        if progress >= min(next_report, 1.0):
            held_out_loss = mean_loss(model, held_out)
            seconds, tokens = time.monotonic() - started, step * options.batch_tokens
            print(
                f"  step {step:6,d}  epoch {tokens / stream.tokens_per_epoch:5.2f}  loss {loss.item():.4f}"
                f"  held-out {held_out_loss:.4f}  {tokens / seconds:,.0f} tokens/s  {seconds:.0f} s",
                flush=True,
            )
            next_report = progress + 1.0 / options.evaluations
            if held_out_loss < best:
                best = held_out_loss
                best_state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best_state)
    seconds = time.monotonic() - started
    epochs = step * options.batch_tokens / stream.tokens_per_epoch
    return f"{step:,} steps, {step * options.batch_tokens / 1e6:.0f} M tokens, {epochs:.1f} epochs, {seconds:.0f} s"


def learning_rate_factor(progress: float, warmup: float) -> float:
    """Linear warm-up, then half a cosine down to 2 %; `progress` runs from 0 to 1 over the whole fit."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min((progress - warmup) / (1 - warmup), 1.0)))


class _Loss:
    """(ids, labels) → scalar: cross entropy, mixed with the divergence from the teacher where there is one."""

    def __init__(self, model: Llama, teacher: Llama | None, teacher_weight: float, compile: bool) -> None:
        self.teacher_weight = teacher_weight if teacher is not None else 0.0
        self.on_cuda = next(model.parameters()).is_cuda
        self.student_loss = torch.compile(self._student_loss, dynamic=False) if compile else self._student_loss
        self.model, self.teacher = model, teacher
        self.teacher_forward = torch.compile(teacher, dynamic=False) if compile and teacher is not None else teacher

    def __call__(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.model.train()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.on_cuda):
            teacher_logits = None
            if self.teacher_forward is not None:
                with torch.no_grad():
                    teacher_logits = self.teacher_forward(ids)
            return self.student_loss(ids, labels, teacher_logits)

    def _student_loss(self, ids: Tensor, labels: Tensor, teacher_logits: Tensor | None) -> Tensor:
        logits = self.model(ids).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if teacher_logits is None:
            return loss
        log_probs = F.log_softmax(logits, dim=-1)
        soft = -(teacher_logits.float().softmax(dim=-1) * log_probs).sum(-1).mean()
        return (1 - self.teacher_weight) * loss + self.teacher_weight * soft


def _compiled_loss(model: Llama, teacher: Llama | None, stream: TokenStream, options: FitOptions) -> _Loss:
    """The loss, run once at each length so that compilation costs no training time; eager where it cannot compile."""
    for use_compile in [True, False] if options.compile else [False]:
        loss = _Loss(model, teacher, options.teacher_weight, use_compile)
        if not use_compile:
            return loss
        try:
            started = time.monotonic()
            torch._dynamo.reset()
            for length in (options.short_length, options.long_length):
                loss(*stream.next(length)).backward()
            model.zero_grad(set_to_none=True)
            print(f"  compiled in {time.monotonic() - started:.0f} s", flush=True)
            return loss
        except Exception as error:  # the compiler's failures have no common type, and none may cost the run
            print(f"  torch.compile failed, training goes on without it: {type(error).__name__}: {error}", flush=True)
            model.zero_grad(set_to_none=True)
            torch._dynamo.reset()
    raise AssertionError("unreachable")


@torch.no_grad()
def mean_loss(model: Llama, held_out: Tensor, rows: int = 32) -> float:
    """Nats per token over held-out windows, int64 [windows, length + 1], in float32, each window on its own."""
    model.eval()
    total = 0.0
    for batch in held_out.split(rows):
        logits = model(batch[:, :-1])
        total += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return total / (held_out.shape[0] * (held_out.shape[1] - 1))


def windows(documents: list[np.ndarray], length: int, device: torch.device) -> Tensor:
    """Documents end to end, cut into int64 [windows, length + 1]; the remainder is dropped."""
    stream = np.concatenate(documents).astype(np.int64)
    count = (len(stream) - 1) // length
    rows = [stream[row * length : row * length + length + 1] for row in range(count)]
    return torch.from_numpy(np.stack(rows)).to(device)
