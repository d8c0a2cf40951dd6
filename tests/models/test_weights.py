"""Loading: all forms of a directory, and every way in which one can be wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from photon_grpc.config.checkpoint import read_checkpoint
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import select
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.parameter_owner import Part, Target
from photon_grpc.layers.unquantized import Unquantized
from photon_grpc.models import Decoder, build, dummy, load
from tests.examples import examples
from tests.models import reference

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return (variant, shard size) -> a directory that no test changes."""
    made: dict[tuple[str, str], Path] = {}

    def get(variant: str, shard_size: str = "5GB") -> Path:
        if (variant, shard_size) not in made:
            path = tmp_path_factory.mktemp("saved")
            made[variant, shard_size] = reference.save(reference.make_model(variant), path, shard_size=shard_size)
        return made[variant, shard_size]

    return get


@pytest.fixture
def copied(saved: Any, tmp_path: Path) -> Callable[[str, str], Path]:
    """Return a copy of one, to be broken."""
    return lambda variant, shard_size="5GB": Path(shutil.copytree(saved(variant, shard_size), tmp_path / "copy"))


def unloaded(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    card = read_model_dir(path)
    return build(card, dtype=dtype, device="cpu", kernels=select("torch", "cpu"), max_model_len=reference.MAX_LEN)


def logits(decoder: Decoder) -> torch.Tensor:
    return torch.cat(reference.paged_logits(decoder, reference.prompts(), block_size=16, chunks=[100]))


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})


def load_error(path: Path) -> str:
    """Return the message of a load that fails; nothing may have been allocated by then."""
    decoder = None
    try:
        decoder = unloaded(path)
        load(decoder, read_model_dir(path))
    except ModelLoadError as error:
        message = str(error)
    else:
        pytest.fail("it was loaded")
    if decoder is not None:
        assert all(target.tensor.is_meta for leaf in decoder.leaves() for target in leaf.targets())
    return message


def test_shards_give_the_same_model_as_one_file(saved: Any, copied: Any) -> None:
    single = logits(reference.load_decoder(saved("llama-untied-linear")))
    sharded = copied("llama-untied-linear", "40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(logits(reference.load_decoder(sharded)), single)
    (sharded / INDEX).unlink()
    assert torch.equal(logits(reference.load_decoder(sharded)), single)


def test_weights_are_converted_to_the_dtype_that_was_asked_for(copied: Any) -> None:
    path = copied("qwen2")
    decoder = reference.load_decoder(path, torch.bfloat16)
    table = load_file(path / SINGLE)["model.embed_tokens.weight"]
    assert torch.equal(decoder.embedding.weight, table.bfloat16())


def test_progress_counts_every_byte_once(saved: Any) -> None:
    path = saved("qwen3", "40KB")
    steps: list[tuple[int, int]] = []
    load(unloaded(path), read_model_dir(path), progress=lambda done, total: steps.append((done, total)))
    total = sum(tensor.nbytes for file in path.glob("*.safetensors") for tensor in load_file(file).values())
    assert steps == sorted(steps)
    assert steps[-1] == (total, total)
    assert {step[1] for step in steps} == {total}


class Halves(Unquantized):
    """W comes in two parts of the checkpoint's tensors, the upper rows and the lower ones."""

    def targets(self, linear: Linear) -> Iterator[Target]:
        for target in super().targets(linear):
            middle = target.tensor.shape[0] // 2
            for rows in (slice(0, middle), slice(middle, None)):
                yield target._replace(tensor=target.tensor[rows], part=Part((rows,), tuple(target.tensor.shape)))


def in_halves(path: Path) -> Decoder:
    config, kernels, halves = read_model_dir(path), select("torch", "cpu"), Halves()
    return build(
        config,
        dtype=torch.float32,
        device="cpu",
        kernels=kernels,
        max_model_len=reference.MAX_LEN,
        method=lambda name: halves,
    )


def test_a_tensor_loaded_in_halves_is_the_whole(saved: Any) -> None:
    path = saved("llama-biases")
    decoder = in_halves(path)
    steps: list[tuple[int, int]] = []
    load(decoder, read_model_dir(path), progress=lambda done, total: steps.append((done, total)))
    assert torch.equal(logits(decoder), logits(reference.load_decoder(path)))
    num_bytes = sum(tensor.nbytes for tensor in load_file(path / SINGLE).values())
    assert steps[-1] == (num_bytes, num_bytes)


def test_a_part_is_filled_at_random_as_part_of_its_whole(saved: Any) -> None:
    whole, halves = unloaded(saved("llama-biases")), in_halves(saved("llama-biases"))
    dummy(whole)
    dummy(halves)
    assert torch.equal(logits(halves), logits(whole))


def test_a_part_of_a_tensor_of_a_wrong_shape_is_refused(copied: Any) -> None:
    path = copied("llama-biases")
    name = "model.layers.0.mlp.down_proj.weight"
    change_tensors(path, lambda tensors: tensors.update({name: torch.ones(50, 112)}))
    with pytest.raises(ModelLoadError, match=rf"{name} has shape \[50, 112\], config.json asks for \[48, 112\]"):
        load(in_halves(path), read_model_dir(path))


def test_a_missing_tensor_is_named(copied: Any) -> None:
    path = copied("llama3-tied")
    change_tensors(path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    assert "missing: model.layers.1.self_attn.k_proj.weight" in load_error(path)


def test_a_surplus_tensor_is_named(copied: Any) -> None:
    path = copied("llama3-tied")
    change_tensors(path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}))
    assert "do not belong to LlamaForCausalLM: model.layers.0.self_attn.q_norm.weight" in load_error(path)


def test_many_wrong_tensors_make_a_short_message(copied: Any) -> None:
    path = copied("llama3-tied")
    reference.edit_json(path / "config.json", num_hidden_layers=300)
    assert "and 2668 more" in load_error(path)
    assert len(load_error(path)) < 1000


def test_a_wrong_shape_is_named_with_both_shapes(copied: Any) -> None:
    path = copied("qwen2")
    change_tensors(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    assert "model.norm.weight has shape [47], config.json asks for [48]" in load_error(path)


def test_integer_tensors_are_refused_as_weights(copied: Any) -> None:
    path = copied("qwen2")
    change_tensors(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    assert "model.norm.weight has dtype I8" in load_error(path)


def test_a_directory_without_weights_says_so(copied: Any) -> None:
    path = copied("qwen2")
    (path / SINGLE).unlink()
    assert "no .safetensors file" in load_error(path)


def test_tensors_stored_twice_by_old_exporters_are_accepted(saved: Any, copied: Any) -> None:
    path = copied("llama3-tied")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)

    change_tensors(path, add)
    assert torch.equal(logits(reference.load_decoder(path)), logits(reference.load_decoder(saved("llama3-tied"))))


def test_a_tied_head_that_differs_is_refused(copied: Any) -> None:
    path = copied("llama3-tied")
    change_tensors(path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(131, 48)}))
    assert "lm_head.weight differs" in load_error(path)


def test_an_index_cannot_lead_out_of_the_directory(copied: Any) -> None:
    path = copied("qwen2", "40KB")
    for name in ("../model.safetensors", "/etc/hostname", "config.json", 7):
        (path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert "must name a .safetensors file here" in load_error(path)


def test_an_index_that_the_files_contradict_is_refused(copied: Any) -> None:
    path = copied("qwen2", "40KB")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.phantom.weight"] = index["weight_map"]["model.norm.weight"]
    (path / INDEX).write_text(json.dumps(index))
    assert "'model.phantom.weight' is not in" in load_error(path)


def test_a_tensor_in_two_files_is_refused(copied: Any) -> None:
    path = copied("qwen2")
    (path / SINGLE).rename(path / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(48)}, path / "b.safetensors")
    assert "'model.norm.weight' is also in a.safetensors" in load_error(path)


def test_a_truncated_file_is_refused(copied: Any) -> None:
    path = copied("qwen2")
    content = (path / SINGLE).read_bytes()
    for length in (0, 5, 8, 100, len(content) // 2, len(content) - 1):
        (path / SINGLE).write_bytes(content[:length])
        assert "model.safetensors" in load_error(path)
    (path / SINGLE).write_bytes(content + b"\0")
    assert "model.safetensors" in load_error(path)


HOSTILE_ENTRIES = [
    {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 192]},
    {"dtype": "F32", "shape": [-48], "data_offsets": [0, 192]},
    {"dtype": "F32", "shape": [48], "data_offsets": [192, 0]},
    {"dtype": "F32", "shape": [48], "data_offsets": [0, 2**62]},
    {"dtype": "F32", "shape": [48], "data_offsets": [0, "192"]},
    {"dtype": "F32", "shape": [48], "data_offsets": [8, 200]},
    {"dtype": "F32", "shape": [48.0], "data_offsets": [0, 192]},
    {"dtype": "F31", "shape": [48], "data_offsets": [0, 192]},
    {"dtype": ["F32"], "shape": [48], "data_offsets": [0, 192]},
    {"dtype": "F32", "shape": 48, "data_offsets": [0, 192]},
    {"dtype": "F32", "shape": [True, 48], "data_offsets": [0, 192]},
    {"dtype": "F32", "shape": [48], "data_offsets": [False, 192]},
    {"dtype": "F32", "shape": [2**64], "data_offsets": [0, 192]},
    {"dtype": "F32", "shape": [48]},
    [],
    None,
]


def write_header(path: Path, header: bytes) -> None:
    """Write the header of a file with 192 bytes of data."""
    (path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(192))


@pytest.mark.parametrize("entry", HOSTILE_ENTRIES, ids=str)
def test_a_header_with_false_entries_is_refused(copied: Any, entry: Any) -> None:
    path = copied("qwen2")
    header = json.dumps({"model.norm.weight": entry}).encode()
    write_header(path, header)
    assert load_error(path).startswith("model.safetensors: is not a valid safetensors file: ")


SOUND = {"dtype": "F32", "shape": [24], "data_offsets": [0, 96]}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([("a", SOUND), ("b", SOUND)], "invalid offset for tensor `"),
        ([("a", SOUND), ("b", SOUND | {"data_offsets": [48, 144]})], "invalid offset for tensor `b`"),
        ([("a", SOUND), ("b", SOUND | {"data_offsets": [100, 196]})], "invalid offset for tensor `b`"),
        ([("a", SOUND), ("a", SOUND | {"data_offsets": [96, 192]})], "invalid offset for tensor `a`"),
        ([("a", SOUND)], "file not fully covered"),
        ([("a\n", SOUND | {"data_offsets": [1, 97]})], r"invalid offset for tensor `a\n`"),
        ([("a" * 10_000, SOUND | {"data_offsets": [1, 97]})], "aaa..."),
        ([("a", {"dtype": "F32", "shape": [1] * 8 + [48], "data_offsets": [0, 192]})], "has 9 dimensions, at most 8"),
    ],
)
def test_problems_with_the_tensors_of_a_header_are_one_short_line(
    tmp_path: Path, entries: list[tuple[str, Any]], said: str
) -> None:
    write_header(
        tmp_path, f"{{{','.join(f'{json.dumps(name)}:{json.dumps(entry)}' for name, entry in entries)}}}".encode()
    )
    with pytest.raises(ModelLoadError) as caught:
        read_checkpoint(tmp_path)
    message = str(caught.value)
    assert message.startswith("model.safetensors: ") and said in message
    assert "\n" not in message and len(message) < 300


def test_a_header_that_takes_gigabytes_to_parse_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / SINGLE).open("wb") as file:
        file.write((100 * 2**20).to_bytes(8, "little"))
        file.truncate(2**30)
    with pytest.raises(ModelLoadError, match=r"claims 104857600 bytes; .* and the limit is 16777216"):
        read_checkpoint(tmp_path)


def test_irregular_files_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")  # opening it would wait forever
    with pytest.raises(ModelLoadError, match=r"a\.safetensors: is a pipe or a device"):
        read_checkpoint(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "a.safetensors").symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match=r"a\.safetensors: is a pipe or a device"):
        read_checkpoint(tmp_path)


def test_a_header_that_is_not_a_json_object_is_refused(copied: Any) -> None:
    path = copied("qwen2")
    for header in (b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":1e999}'):
        (path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
        assert "model.safetensors" in load_error(path)
    (path / SINGLE).write_bytes((2**63).to_bytes(8, "little") + b"{}")
    assert "claims" in load_error(path)
    (path / SINGLE).write_bytes(b"")
    assert "is empty" in load_error(path)


@pytest.fixture(scope="module")
def victim(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(saved("qwen2"), tmp_path_factory.mktemp("victim") / "model"))


@settings(max_examples=examples(60))
@given(data=st.data())
def test_no_change_of_header_bytes_gets_past_as_anything_but_a_load_error(
    victim: Path, saved: Any, data: st.DataObject
) -> None:
    content = bytearray((saved("qwen2") / SINGLE).read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, length + 7))] = data.draw(st.integers(0, 255))
    (victim / SINGLE).write_bytes(content)
    message = ""
    try:
        reference.load_decoder(victim)
    except ModelLoadError as error:
        message = str(error)
    assert len(message) < 2000


def test_dummy_weights_follow_from_seed_and_name(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("photon_grpc.layers.unquantized.pack", lambda weight, bias: None)  # cannot be read back

    def weights(seed: int) -> dict[str, torch.Tensor]:
        decoder = unloaded(saved("llama-biases"))
        dummy(decoder, seed)
        return {target.name: target.tensor for leaf in decoder.leaves() for target in leaf.targets()}

    first, again, other = weights(3), weights(3), weights(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    names = [f"model.layers.{layer}.mlp.gate_proj.weight" for layer in (0, 1)]
    assert not torch.equal(first[names[0]], first[names[1]])
    assert first[names[0]].std().item() == pytest.approx(0.02, rel=0.1)
    assert first["model.norm.weight"].mean().item() == pytest.approx(1.0, abs=0.02)


def test_dummy_needs_no_weight_files(copied: Any) -> None:
    path = copied("qwen3")
    (path / SINGLE).unlink()
    decoder = unloaded(path, torch.bfloat16)
    dummy(decoder)
    found = logits(decoder)
    assert found.isfinite().all()
    assert found.std() > 0
