"""Read the weights of a model one tensor at a time, and hand them over by name.

    for name, tensor in load(checkpoint(folder), rename=..., place=..., transform=...): ...

A source yields `StoredTensor`s; each must be read before the next is asked for. Files are mapped into memory, so
reading takes pages of the file's cache and none of the process's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import DataError, UnsupportedError

PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that hold plain weights; one may be read where another is expected. Codes of 8 and 4 bits may not."""
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""safetensors' names."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a source, not read yet."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: str
    """The file that holds it, for messages."""
    rows: Callable[[int, int], Tensor]
    """Read the slice [start:stop] of the first dimension."""

    def read(self) -> Tensor:
        """Read the whole tensor."""
        return self.rows(0, self.shape[0] if self.shape else 1)


class InFile:
    """Reads rows of a tensor of an open safetensors file, which is mapped, and tells where its bytes lie.

    Args:
        opened: the file, as `safe_open` opened it.
        offset: of the tensor's first byte in the file.
    """

    def __init__(self, opened: Any, file: Path, offset: int, name: str, shape: tuple[int, ...]) -> None:
        self.file, self.offset = file, offset
        self._opened, self._name, self._shape = opened, name, shape

    def __call__(self, start: int, stop: int) -> Tensor:
        tensor: Tensor = self._opened.get_tensor(self._name)
        return tensor[start:stop] if self._shape else tensor


def load(
    source: Iterable[StoredTensor],
    *,
    rename: Callable[[str], str | None] | None = None,
    place: Callable[[str, StoredTensor], Tensor] | None = None,
    transform: Callable[[str, Tensor], Tensor] | None = None,
    expected: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a source by name, in the source's order. A tensor is a view of its file unless a hook
    copies it, and is dropped before the next is read.

    Args:
        rename: the name that a stored tensor gets; None skips it, and nothing of it is read.
        place: reads a tensor, or its shard, to where it belongs; without, all of it to the CPU.
        transform: changes a tensor that was placed (quantises it).
        expected: all tensors to load, by their new names (on the meta device, for instance).
    Raises:
        DataError: a tensor is missing from the source, has no place in `expected`, comes twice, or has another shape
            there, or a dtype that doesn't convert.
    """
    seen: set[str] = set()
    origin = "empty"
    for stored in source:
        origin = stored.origin
        name = rename(stored.name) if rename else stored.name
        if name is None:
            continue
        if name in seen:
            raise DataError(f"{stored.origin}: {name} comes twice", "download or save the checkpoint again")
        seen.add(name)
        if expected is not None:
            _check_expected(name, stored, expected)
        yield name, _read(name, stored, place, transform)
    missing = sorted(expected.keys() - seen) if expected is not None else []
    if missing:
        raise DataError(
            f"the checkpoint lacks {len(missing)} of the model's weights ({', '.join(missing[:3])} ...; "
            f"the last file is {origin})",
            "download or copy it again: configuration and weights must be of one model",
        )


def _read(
    name: str,
    stored: StoredTensor,
    place: Callable[[str, StoredTensor], Tensor] | None,
    transform: Callable[[str, Tensor], Tensor] | None,
) -> Tensor:
    """Read one tensor. Not a line of `load`, whose variables would hold it while the next one is read."""
    tensor = place(name, stored) if place else stored.read()
    return transform(name, tensor) if transform else tensor


def _check_expected(name: str, stored: StoredTensor, expected: Mapping[str, Tensor]) -> None:
    remedy = "configuration and weights must be of one model"
    if name not in expected:
        raise DataError(f"{stored.origin}: {stored.name} has no place in the model", remedy)
    target = expected[name]
    if stored.shape != tuple(target.shape):
        raise DataError(f"{stored.origin}: {stored.name} is {[*stored.shape]}, not {[*target.shape]}", remedy)
    if stored.dtype != target.dtype and not (stored.dtype in PLAIN and target.dtype in PLAIN):
        raise DataError(f"{stored.origin}: {stored.name} is {stored.dtype}, not {target.dtype}", remedy)


def checkpoint(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a safetensors file, a folder of them (with an index if there are several) or a GGUF file,
    file by file and in each file's own order. All files are checked before the first tensor comes.

    Raises:
        DataError: a file or a tensor that the index names is missing, or a file is damaged or cut short.
    """
    if path.suffix == ".gguf":
        return _gguf(path)
    return _safetensors(check_weights(path) if path.is_dir() else [path], path)


def _safetensors(files: list[Path], path: Path) -> Iterator[StoredTensor]:
    from safetensors import safe_open

    for file in files:
        _check_file(file)
    index = path / "model.safetensors.index.json"
    indexed = index.is_file() and not (path / "model.safetensors").is_file()
    parts: dict[str, str] = json_value(index, "weight_map") if indexed else {}
    for file in files if indexed else []:
        with safe_open(file, "pt") as opened:
            # the hub's converter leaves tied weights out, and names them in the file's metadata
            held = {*opened.keys(), *(opened.metadata() or ())}
            lost = {name for name, part in parts.items() if path / part == file} - held
        if lost:
            raise DataError(f"{index} names {min(lost)}, which {file} lacks", "copy, download or save it again")
    for file in files:
        offsets = _offsets(file)
        with safe_open(file, "pt") as opened:
            for name in opened.offset_keys():
                if name in parts and path / parts[name] != file:
                    continue  # the index has it elsewhere; `check_weights_fit` compares both
                part = opened.get_slice(name)
                shape, dtype = tuple(part.get_shape()), _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise DataError(f"{file}: {name} is {part.get_dtype()}", "save it in a dtype that torch has")

                yield StoredTensor(name, shape, dtype, str(file), InFile(opened, file, offsets[name], name, shape))


def _offsets(file: Path) -> dict[str, int]:
    """Return where each tensor of a safetensors file begins, by its header; safetensors' own reader doesn't tell."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


@contextmanager
def open_gguf(path: Path) -> Iterator[Any]:
    """Open a GGUF file with gguf's reader, and tell of a damaged one while the block reads its header.

    Raises:
        DataError: it is no GGUF file or is cut short.
        UnsupportedError: the `gguf` package is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnsupportedError(
            f"{path.name} can't be read without the gguf package", "pip install 'pronghorn[gguf]'"
        ) from error
    try:
        yield GGUFReader(str(path))
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise DataError(f"{path} is not a readable GGUF file ({error})", "download it again") from error


def _gguf(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a GGUF file under the file's own names, unpacked to float32 when they are read."""
    with open_gguf(path) as reader:
        tensors = reader.tensors
    from gguf.quants import dequantize

    for packed in tensors:

        def rows(start: int, stop: int, packed: Any = packed) -> Tensor:
            try:
                return torch.tensor(dequantize(packed.data[start:stop], packed.tensor_type))
            except NotImplementedError as error:
                raise UnsupportedError(
                    f"{packed.name} of {path.name} is in {packed.tensor_type.name}, which gguf doesn't unpack",
                    "use a file of another kind: F16, BF16 or Q8_0",
                ) from error

        yield StoredTensor(packed.name, tuple(map(int, reversed(packed.shape))), torch.float32, str(path), rows)


def check_weights(folder: Path) -> list[Path]:
    """Return the safetensors files that loading reads: a whole model's, else its parts. Others in the folder may be
    anything (Mistral's own beside transformers', old parts).

    Raises:
        DataError: there are none, or one is damaged, cut short, gone, or outside the folder.
    """
    name = "adapter_model" if (folder / "adapter_config.json").is_file() else "model"
    whole, index = folder / f"{name}.safetensors", folder / f"{name}.safetensors.index.json"
    files = [whole] if whole.is_file() else []
    if not files and index.is_file():
        parts = json_value(index, "weight_map")
        if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
            raise DataError(f"{index}: its weight_map names no files", "copy, download or save it again")
        outside = [part for part in parts.values() if Path(part).is_absolute() or ".." in Path(part).parts]
        if outside:
            raise DataError(f"{index} names a file outside its folder ({outside[0]})", "download it again")
        files = [folder / part for part in sorted(set(parts.values()))]
    for file in files:
        if not file.is_file():
            raise DataError(f"{index} names {file.name}, which is not there", "copy or download it")
        _check_file(file)
    if not files:
        kinds = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
        found = sorted(file.name for file in folder.iterdir() if file.suffix in kinds)
        remedy = "copy or download the model's (or adapter's) weights into that folder"
        if any(file.startswith("consolidated") for file in found):
            remedy = f"those are Mistral's own: download the repository's {name}-….safetensors and their index, too"
        elif (folder / "zero_to_fp32.py").is_file():
            remedy = f"it is DeepSpeed's checkpoint: python {folder}/zero_to_fp32.py {folder} OUT --safe_serialization"
        elif pieces := next(folder.glob("*/*.distcp"), None):
            remedy = f"it is FSDP's checkpoint: accelerate merge-weights {pieces.parent} {folder}"
        elif f"{name}.safetensors" in found:
            remedy = f"{name}.safetensors is not a file, or a link to none: copy the file itself"
        elif name == "adapter_model" and found == ["model.safetensors"]:
            remedy = "adapter_config.json says that it is an adapter: remove that file if it is a whole model"
        elif f"{name}.bin" not in found and any(file.endswith(".safetensors") for file in found):
            remedy = f"name a single file {name}.safetensors; several need their {name}.safetensors.index.json, too"
        elif found:
            remedy = "pickled weights are never read: convert them to safetensors; a GGUF file is given by its own path"
        raise DataError(
            f"{folder} holds no safetensors weights to load (found: {', '.join(found) or 'no weights at all'})", remedy
        )
    return files


def json_value(path: Path, key: str) -> Any:
    """Read what the JSON file holds under the key."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: no {key} to be read ({error})", "copy, download or save it again") from error


def model_beneath(folder: Path) -> Path | None:
    """Return the first folder of a model at most two levels below one that is none; the hub's cache has it so."""
    names = [f"{depth}/{name}config.json" for depth in ("*", "*/*") for name in ("", "adapter_")]
    found = sorted(path.parent for name in names for path in folder.glob(name))
    return next(iter(found), None)


def _check_file(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt"):
            pass  # opening compares the header with the file's size
    except (SafetensorError, OSError) as error:
        pointer, reason = False, error
        try:
            with file.open("rb") as opened:
                pointer = opened.read(22) == b"version https://git-lf"
        except OSError as denied:  # safetensors says that it isn't there
            reason = denied
        remedy = "that is a pointer of Git LFS: git lfs pull gets the file" if pointer else "copy or download it again"
        raise DataError(f"{file}: not a whole safetensors file ({reason})", remedy) from error
