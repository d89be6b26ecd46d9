"""Which way packed attention goes: device, dtype and head size decide, or whoever asks for a backend by name."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pronghorn.attention import efficient, long_documents, varlen
from pronghorn.device import AMPERE, has_triton
from pronghorn.errors import UnsupportedError

Backend = Literal["auto", "tiled", "flash", "per_document", "masked"]
TILED_HEAD_DIMS = (16, 32, 64, 128)


def choose(backend: Backend, query: Tensor) -> tuple[str, str]:
    """Choose the backend that serves queries like this [..., D], and say why.

    Raises:
        UnsupportedError: a backend was asked for by name and can't serve them.
    """
    by_tiles, reason = tiles_refusal(query), varlen.refusal(query)
    asked = {"tiled": by_tiles, "flash": reason}.get(backend)
    if asked is not None:
        raise _refused(backend, asked)
    if backend != "auto":
        return backend, "asked for"
    if by_tiles is None:
        return "tiled", "the kernels over the batch's tiles serve this device, dtype and head size"
    if reason is None:
        return "flash", f"torch's varlen kernels; {by_tiles}"
    if efficient.refusal(query) is None:
        return "efficient", f"torch's memory-efficient kernels; {reason}"
    # On two CPU cores a row of four documents costs half as much document by document as under a dense mask.
    return "per_document", reason


def check_on(backend: Backend, query: Tensor, card: str, is_ampere: bool) -> None:
    """Refuse what `choose` would refuse on a card that needn't be here.

    Args:
        query: of any device.
        is_ampere: whether the card is an Ampere or newer.
    Raises:
        UnsupportedError: as `choose`.
    """
    if backend not in ("tiled", "flash"):
        return
    unfit = _unfit_query(query) if backend == "tiled" else varlen.unfit_query(query)
    if unfit is None and not is_ampere:
        unfit = f"{card} is older than Ampere (compute capability 8.0)"
    if unfit is not None:
        raise _refused(backend, unfit)


def _refused(backend: Backend, why: str) -> UnsupportedError:
    return UnsupportedError(f"attention {backend!r} was asked for, but {why}", "use attention='auto'")


def long_from(backend: Backend, query: Tensor) -> int | None:
    """Return from how many tokens on documents go through cuDNN where `choose` says tiled (`long_documents`); None:
    none do, as where tiles were asked for by name."""
    return long_documents.least_tokens(query) if backend == "auto" else None


def tiles_refusal(query: Tensor) -> str | None:
    """Say why `kernels.attention` can't serve queries like this [..., D], or None if they can."""
    if query.device.type != "cuda":
        return f"device {query.device.type} has no Triton kernels"
    if (unfit := _unfit_query(query)) is not None:
        return unfit
    if torch.cuda.get_device_capability(query.device) < AMPERE:
        return f"{torch.cuda.get_device_name(query.device)} is older than Ampere (compute capability 8.0)"
    return None if has_triton() else "triton is not installed"


def _unfit_query(query: Tensor) -> str | None:
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"attention by tiles has no {str(query.dtype).removeprefix('torch.')}"
    if query.shape[-1] not in TILED_HEAD_DIMS:
        return f"head_dim {query.shape[-1]} is not one of {', '.join(map(str, TILED_HEAD_DIMS))}"
    return None
