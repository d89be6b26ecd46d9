"""Tensors of checkpoints, one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pronghorn.errors import DataError
from pronghorn.precision.loader import StoredTensor, checkpoint, load

WEIGHTS = {name: torch.full((2, 3), float(i)) for i, name in enumerate("cab")}


def sharded(folder: Path, shards: list[dict[str, Tensor]] | None = None) -> Path:
    """Save weights, one in a shard, with an index."""
    shards = shards or [{name: weight} for name, weight in WEIGHTS.items()]
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file)
    index = {"weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_tensors_come_file_by_file(tmp_path: Path) -> None:
    read = list(load(checkpoint(sharded(tmp_path))))
    assert [name for name, _ in read] == ["c", "a", "b"]
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in read)
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert dict(load(checkpoint(tmp_path / "model.safetensors"))).keys() == WEIGHTS.keys()


def test_hooks_rename_place_and_transform_in_this_order(tmp_path: Path) -> None:
    placed = []

    def first_row(name: str, stored: StoredTensor) -> Tensor:
        placed.append((name, stored.name, stored.shape))
        return stored.rows(0, 1)

    source = checkpoint(sharded(tmp_path))
    names = {"c": "third", "b": "second"}
    read = dict(load(source, rename=names.get, place=first_row, transform=lambda name, tensor: tensor * 10))
    assert placed == [("third", "c", (2, 3)), ("second", "b", (2, 3))]
    assert read["third"].tolist() == [[0, 0, 0]] and read["second"].tolist() == [[20, 20, 20]]


def test_a_skipped_tensor_is_not_read() -> None:
    def never(start: int, stop: int) -> Tensor:
        raise AssertionError

    assert list(load([StoredTensor("a", (2,), torch.float32, "file", never)], rename=lambda name: None)) == []


def test_a_tensor_is_dropped_before_the_next_is_read(tmp_path: Path) -> None:
    last: list[weakref.ref[Tensor]] = []

    def place(name: str, stored: StoredTensor) -> Tensor:
        assert not last or last[-1]() is None, f"{name} is read while the one before lies in memory"
        tensor = stored.read().clone()
        last.append(weakref.ref(tensor))
        return tensor

    for _, tensor in load(checkpoint(sharded(tmp_path)), place=place, transform=lambda name, tensor: tensor * 2):
        del tensor
    assert len(last) == len(WEIGHTS)


def test_a_missing_shard_is_named_before_anything_is_read(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(DataError, match=r"index\.json names model-00003-of-00003\.safetensors, which is not there"):
        next(checkpoint(tmp_path))


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    file = sharded(tmp_path) / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for path in (tmp_path, file):
        with pytest.raises(DataError, match=r"model-00002-of-00003\.safetensors: not a whole safetensors file"):
            next(checkpoint(path))


def test_a_tensor_that_only_the_index_names_is_named(tmp_path: Path) -> None:
    save_file({"other": WEIGHTS["a"]}, sharded(tmp_path) / "model-00002-of-00003.safetensors")
    with pytest.raises(DataError, match=r"names a, which .*model-00002-of-00003\.safetensors lacks"):
        next(checkpoint(tmp_path))


def test_an_index_may_name_a_tied_weight_that_the_converter_left_out(tmp_path: Path) -> None:
    """The hub's converter to safetensors keeps the index of the pickled files, and names what it left out in the
    file's metadata."""
    file = sharded(tmp_path) / "model-00002-of-00003.safetensors"
    save_file({"kept": WEIGHTS["a"]}, file, {"format": "pt", "a": "kept"})
    assert [name for name, _ in load(checkpoint(tmp_path))] == ["c", "kept", "b"]  # though no index names it


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00003.safetensors").chmod(0)
    with pytest.raises(DataError, match=r"00002-of-00003\.safetensors: not a whole safetensors file .*denied"):
        next(checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"a": torch.empty(3, 2)}, r"model-00002-of-00003\.safetensors: a is \[2, 3\], not \[3, 2\]"),
        ({"a": torch.empty(2, 3, dtype=torch.int8)}, r"00002-of-00003\.safetensors: a is torch\.float32, not torch\.i"),
        ({"a": torch.empty(2, 3, dtype=torch.float8_e4m3fn)}, "a is torch.float32, not torch.float8"),
        ({"d": torch.empty(2, 3)}, r"lacks 1 of the model's weights \(d"),
    ],
)
def test_what_is_not_as_expected_is_named(tmp_path: Path, expected: dict[str, Tensor], message: str) -> None:
    want = {name: weight.to("meta", torch.bfloat16) for name, weight in WEIGHTS.items()}
    assert len(list(load(checkpoint(sharded(tmp_path)), expected=want))) == 3
    with pytest.raises(DataError, match=message):
        list(load(checkpoint(tmp_path), expected=want | expected))
    del want["b"]
    with pytest.raises(DataError, match="b has no place in the model"):
        list(load(checkpoint(tmp_path), expected=want))


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="same comes twice"):
        list(load(checkpoint(sharded(tmp_path)), rename=lambda name: "same"))


def test_a_gguf_file_is_unpacked_by_rows(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(4, 64)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("plain", weight.numpy())
    packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = {entry.name: entry for entry in checkpoint(tmp_path / "model.gguf")}
    assert torch.equal(stored["plain"].read(), weight)
    assert stored["packed"].shape == (4, 64) and stored["packed"].rows(1, 3).shape == (2, 64)
    assert torch.allclose(stored["packed"].read(), weight, atol=0.02)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(DataError, match=r"bad\.gguf is not a readable GGUF file"):
        next(checkpoint(tmp_path / "bad.gguf"))


MEASURE = """
import sys
import weakref
from pathlib import Path
import torch
from pronghorn.precision.loader import checkpoint, load

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

torch.ones(8).sum().item()
before, most = anonymous(), 0
for name, tensor in load(checkpoint(Path(sys.argv[1])), transform=lambda name, tensor: tensor * 1.0):
    most = max(most, anonymous() - before)
print(most)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_checkpoint_never_lies_in_memory_whole(tmp_path: Path) -> None:
    """300 MB in 4 shards of 3 tensors: the copies that the hook makes, one at a time, are all that grows."""
    shards = [{f"{i}.{j}": torch.full((25, 2**18), 1.0) for j in range(3)} for i in range(4)]
    sharded(tmp_path, shards)
    shard = (tmp_path / "model-00001-of-00004.safetensors").stat().st_size
    # what is held, and not what the C library keeps of what was freed: that doubled it in one of many runs
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert 2**20 < int(run.stdout) < 1.5 * shard
