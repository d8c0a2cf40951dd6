"""`python -m benchmarks.embedded_model.eagle3 --minutes 12 --out DIRECTORY`: trains an EAGLE-3 head for the embedded
model on this interpreter's standard library, and prints how often its drafts are the model's own ids.

EAGLE-3 (Li et al. 2025, arXiv:2503.01840), in plain torch over whole sequences; the names of the parameters are those
of public checkpoints. With the states h of three layers of the model at position p, and the id x behind it:

    f[p]    = fc · [h_low[p], h_middle[p], h_high[p]]
    a[p]    = f[p] + attention([norm(embedding(x[p + 1])), norm(f)])[p]
    s[p]    = a[p] + mlp(norm(a[p]))
    logits of the id behind x[p + 1] = lm_head · norm(s[p]),   over `draft_vocab_size` ids, d2t[i] + i in the model's

A further draft takes s[p] for f[p + 1]. Training does so, too: each id is drafted from true states, from the first
draft's, from the second's, ….
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from photon_grpc import demo

from .llama import Llama, LlamaShape, rotary_tables, rotate
from .loop import TokenStream, learning_rate_factor, windows
from .sources import library_sources
from .tokenizer import VOCAB_SIZE, encode_documents, render_document

SHAPE = LlamaShape(256, 512, num_layers=1, num_heads=8, num_kv_heads=4)
DRAFT_VOCAB_SIZE = 2048
#: Drafts of a position that the loss counts, and how much less each next one does.
NUM_DRAFTS = 3
DECAY = 0.8
#: Every so many files of the library are kept for the acceptance.
HELD_OUT_EVERY = 40


class Attention(nn.Module):
    """Attention whose inputs are an embedding and a state side by side."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [batch, tokens, 2 · hidden] -> queries, keys and values [batch, heads, tokens, head_dim], turned."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Midlayer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)


@dataclass
class Chain:
    """Keys and values of all drafts so far: those of true states, then one of each draft before."""

    keys: list[Tensor]
    values: list[Tensor]


class Eagle3(nn.Module):
    """A head; draft `number` of every position p has its query, key and value at position p + number."""

    d2t: Tensor
    t2d: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def keep(self, ids: Tensor) -> None:
        """Draft these ids of the model, ascending, alone."""
        self.d2t.copy_(ids.to(self.d2t.device) - torch.arange(len(ids), device=self.d2t.device))
        self.t2d.zero_()[ids] = True

    @property
    def kept(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def draft(self, embedded: Tensor, states: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
        """Return (logits, states of the next draft); adds to the chain.

        Args:
            embedded: [batch, tokens, hidden], the vectors of the ids behind.
            states: [batch, tokens, hidden], f for the first draft.
        """
        layer, number, tokens = self.midlayer, len(chain.keys), states.shape[1]
        x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(states)), dim=-1)
        cos, sin = self.cos[number : number + tokens], self.sin[number : number + tokens]
        q, k, v = layer.self_attn.heads(x, cos, sin)
        chain.keys.append(k)
        chain.values.append(v)
        states = states + layer.self_attn.o_proj(attended(q, chain).transpose(1, 2).flatten(2))
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        return self.lm_head(self.norm(states)), states


def attended(q: Tensor, chain: Chain) -> Tensor:
    """Attend to the true keys up to one's own position p, and to one key of every draft before at p."""
    true, *others = chain.keys
    scale = q.shape[-1] ** -0.5
    if not others:
        return F.scaled_dot_product_attention(q, true, chain.values[0], is_causal=True)
    tokens = q.shape[2]
    scores = (q @ true.transpose(-1, -2)).float() * scale
    is_later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(is_later, float("-inf"))
    own = [(q * k).sum(-1, keepdim=True).float() * scale for k in others]
    weights = torch.cat((scores, *own), dim=-1).softmax(-1).to(q.dtype)
    out = weights[..., :tokens] @ chain.values[0]
    for number, value in enumerate(chain.values[1:]):
        out = out + weights[..., tokens + number, None] * value
    return out


@torch.no_grad()
def observed(target: Llama, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's logits and the states [batch, tokens, 3 · hidden] before layers 2, L / 2 and L - 3."""
    kept, num_layers = [], target.shape.num_layers
    x = target.model.embed_tokens(ids)
    cos, sin = target.cos[: ids.shape[1]], target.sin[: ids.shape[1]]
    for number, layer in enumerate(target.model.layers):
        if number in (2, num_layers // 2, num_layers - 3):
            kept.append(x)
        x = layer(x, cos, sin)
    return F.linear(target.model.norm(x), target.model.embed_tokens.weight), torch.cat(kept, dim=-1)


def drafts_of(head: Eagle3, target: Llama, ids: Tensor, states: Tensor, count: int) -> list[Tensor]:
    """Return the logits of `count` drafts; those of draft n at p are of the id at p + n + 2."""
    chain, found = Chain([], []), []
    states = head.fc(states[:, : ids.shape[1] - count - 1])
    for number in range(count):
        following = ids[:, number + 1 : number + 1 + states.shape[1]]
        logits, states = head.draft(target.model.embed_tokens(following), states, chain)
        found.append(logits)
    return found


def loss_of(head: Eagle3, target: Llama, ids: Tensor) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits, states = observed(target, ids)
        drafted = drafts_of(head, target, ids, states, NUM_DRAFTS)
    wanted = logits[..., head.kept].float().softmax(-1)
    losses = []
    for number, logits_of in enumerate(drafted):
        own = wanted[:, number + 1 : number + 1 + logits_of.shape[1]]
        losses.append(DECAY**number * -(own * F.log_softmax(logits_of.float(), -1)).sum(-1).mean())
    return sum(losses[1:], losses[0])


@torch.no_grad()
def acceptance(head: Eagle3, target: Llama, batches: Tensor) -> list[float]:
    """Return, of each draft, the share of positions at which it and all before it are the model's greedy ids.

    Texts are given: beside a right draft stands the id that the text has, which is not always the model's.
    """
    shares = torch.zeros(NUM_DRAFTS, device=batches.device)
    for ids in batches.split(8):
        logits, states = observed(target, ids)
        best, still = logits.argmax(-1), None
        for number, found in enumerate(drafts_of(head, target, ids, states, NUM_DRAFTS)):
            own = best[:, number + 1 : number + 1 + found.shape[1]]
            right = head.kept[found.argmax(-1)] == own
            still = right if still is None else still & right
            shares[number] += still.float().mean() * len(ids)
            # Only where the text goes on as the model does is the next draft that of the model's own text.
            still &= own == ids[:, number + 2 : number + 2 + found.shape[1]]
    return (shares / len(batches)).tolist()


def config_of(head: Eagle3, vocab_size: int) -> dict[str, Any]:
    named = head.shape.hf_config() | {"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False}
    return named | {"vocab_size": vocab_size, "draft_vocab_size": len(head.d2t)}


def save(head: Eagle3, directory: Path) -> None:
    """Write the directory of a public EAGLE-3 head, weights in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).cpu().contiguous()
        for name, value in head.state_dict().items()
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    text = json.dumps(config_of(head, len(head.t2d)), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def embedded_target(device: torch.device) -> Llama:
    config = json.loads((demo.TARGET / "config.json").read_text(encoding="utf-8"))
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    target = Llama(LlamaShape(*(config[name] for name in sizes)))
    weights = {name: value.float() for name, value in load_file(demo.TARGET / "model.safetensors").items()}
    target.load_state_dict(weights)
    return target.eval().requires_grad_(False).to(device)


def read_library() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the ids of the files to learn, and of the held-out ones."""
    tokenizer = Tokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
    sources = [render_document(text) for _, text in library_sources(Path(sysconfig.get_paths()["stdlib"]))]
    documents = encode_documents(tokenizer, sources)
    held_out = documents[::HELD_OUT_EVERY]
    return [ids for number, ids in enumerate(documents) if number % HELD_OUT_EVERY], held_out


def new_head(target: Llama, documents: Sequence[np.ndarray]) -> Eagle3:
    """Return a head of the most frequent ids; its output matrix begins as the model's."""
    head = Eagle3(SHAPE, VOCAB_SIZE, DRAFT_VOCAB_SIZE)
    counts = np.bincount(np.concatenate(documents), minlength=VOCAB_SIZE)
    head.keep(torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:DRAFT_VOCAB_SIZE])))
    for parameter in head.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    head.to(target.cos.device)
    with torch.no_grad():
        third = SHAPE.hidden_size
        head.fc.weight[:, 2 * third :] += torch.eye(third, device=head.fc.weight.device)
        head.lm_head.weight.copy_(target.model.embed_tokens.weight[head.kept])
    return head


def fit(head: Eagle3, target: Llama, documents: list[np.ndarray], args: argparse.Namespace) -> int:
    """Train for so many minutes; return the tokens read."""
    stream = TokenStream(documents, args.batch_tokens, 0, torch.device(args.device))
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    begun, step, told = time.monotonic(), 0, 0.0
    while (progress := (time.monotonic() - begun) / (60 * args.minutes)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * learning_rate_factor(progress, 0.05)
        ids, _ = stream.next(args.length)
        loss = loss_of(head, target, ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if progress >= told:
            told = progress + 0.05
            print(f"  step {step}, loss {loss.item():.3f}, {time.monotonic() - begun:.0f} s", flush=True)
    return step * args.batch_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=13.0)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    target = embedded_target(torch.device(args.device))
    documents, held_out = read_library()
    head = new_head(target, documents)
    num_tokens = fit(head, target, documents, args)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    batches = windows(held_out, 255, torch.device(args.device))
    shares = acceptance(head, target, batches[:: max(1, len(batches) // 64)])
    save(head, args.out)
    told = " ".join(f"{share:.3f}" for share in shares)
    print(f"{num_tokens:,} tokens of {sum(map(len, documents)):,}; right on held-out files: {told}")


if __name__ == "__main__":
    main()
