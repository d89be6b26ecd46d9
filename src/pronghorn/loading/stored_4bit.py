"""What bitsandbytes stored beside 4-bit weights, checked in the files: its kernels read where they are told to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pronghorn.errors import DataError
from pronghorn.precision.loader import StoredTensor, checkpoint

_STATE = ".quant_state.bitsandbytes__"


def check_4bit(files: Iterable[Path]) -> None:
    """Refuse 4-bit weights whose scales or codes are missing, or of another size than their own description says.

    Without a nested scale bitsandbytes takes the codes of scales for scales, and with too few it reads other memory.

    Raises:
        DataError: names the tensor, its size and what it has to be.
    """
    tensors: dict[str, StoredTensor] = {}
    said: dict[str, dict[str, int]] = {}
    for file in files:
        for tensor in checkpoint(file):
            tensors[tensor.name] = tensor
            if _STATE in tensor.name:
                said[tensor.name] = _sizes(tensor)
    described = {name.partition(_STATE)[0] for name in said}
    for name in tensors:
        if (weight := name.removesuffix(".absmax")) not in described and weight != name:
            raise DataError(
                f"{tensors[name].origin} lacks {weight}{_STATE}…, which describes a 4-bit weight",
                "copy or download the checkpoint again",
            )
    for name, sizes in said.items():
        weight, state = name.partition(_STATE)[0], tensors[name]
        for part, size in sizes.items():
            found = tensors.get(weight + part)
            held = 0 if found is None else math.prod(found.shape) * (found.dtype.itemsize if not part else 1)
            if held != size:
                what = "numbers" if part else "bytes"
                raise DataError(
                    f"{state.origin}: {weight}{part} of a 4-bit weight holds {held:,} {what}, and {size:,} are its own",
                    "copy or download the checkpoint again",
                )


def _sizes(state: StoredTensor) -> dict[str, int]:
    """Return how many bytes a packed weight has, and how many numbers each tensor beside it, by the end of its name."""
    try:
        table: dict[str, Any] = json.loads(bytes(state.read().flatten().tolist()))
        count, block = math.prod(table["shape"]), table["blocksize"]
        scales = -(-count // block)
        sizes = {"": -(-count // 2), ".absmax": scales, ".quant_map": 16}
        if "nested_blocksize" in table:
            sizes |= {".nested_absmax": -(-scales // table["nested_blocksize"]), ".nested_quant_map": 256}
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise DataError(
            f"{state.origin}: {state.name} is not a description of a 4-bit weight ({error})",
            "copy or download the checkpoint again",
        ) from error
    return sizes
