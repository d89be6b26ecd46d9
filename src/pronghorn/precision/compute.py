"""In which numbers frozen weights are multiplied, and where that can be."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, get_args

import torch

from pronghorn.compute_names import ComputeName
from pronghorn.errors import ConfigError, UnsupportedError

CAPABILITY, INTEGERS = (8, 9), (8, 0)
"""The first compute capabilities with products of 8-bit floats, Ada, and of 8-bit integers as kernels here use them,
Ampere."""
MULTIPLE = 16
"""Rows and columns of a weight that an 8-bit product takes are a multiple of this."""


class Numbers(StrEnum):
    """In what a product multiplies."""

    DTYPE = "dtype"
    E4M3 = "e4m3"
    INT8 = "int8"


class Rule(NamedTuple):
    """In what one frozen weight multiplies."""

    forward: Numbers
    backward: Numbers
    """Of the input's gradient."""

    @property
    def in_8_bits(self) -> bool:
        """Whether products are in 8 bits, of the backward pass at least."""
        return self.backward is not Numbers.DTYPE


class Compute(StrEnum):
    """In what the products of frozen weights are computed: of the forward pass, and of its input's gradient.

    dtype        the model's dtype
    fp8          input gradients in e4m3 with a scale a row, by the tensor cores' fast sums; the forward in the dtype
    fp8_both     the forward in 8 bits, too
    fp8_exact    as fp8_both, summed exactly, about 9 % slower a product
    int8         both in 8-bit integers of rotated rows (`precision.int8`); the forward of what mixes tokens takes first
                 (queries, keys and values) in the dtype
    """

    DTYPE, FP8, FP8_BOTH, FP8_EXACT, INT8 = get_args(ComputeName)

    @classmethod
    def of(cls, name: str) -> Compute:
        """Read a compute's name. Raises ConfigError for an unknown one."""
        if name not in list(cls):
            raise ConfigError(f"compute {name!r} is unknown", f"use one of {', '.join(cls)}")
        return cls(name)

    @property
    def in_8_bits(self) -> bool:
        """Whether products are in 8 bits, of the backward pass at least."""
        return self is not Compute.DTYPE

    @property
    def rule(self) -> Rule:
        """In what products multiply, but for what `layers.build` says of `int8`."""
        if self is Compute.INT8:
            return Rule(Numbers.INT8, Numbers.INT8)
        forward = Numbers.E4M3 if self.forward_in_fp8 else Numbers.DTYPE
        return Rule(forward, Numbers.E4M3 if self.in_8_bits else Numbers.DTYPE)

    @property
    def forward_in_fp8(self) -> bool:
        """Whether products of the forward pass are in e4m3."""
        return self in (Compute.FP8_BOTH, Compute.FP8_EXACT)

    @property
    def forward_in_8_bits(self) -> bool:
        """Whether products of the forward pass are in 8 bits, those of most weights at least."""
        return self.rule.forward is not Numbers.DTYPE


def has_products(compute: Compute, device: torch.device) -> bool:
    """Tell whether a device has the products of a compute; the CPU has all, emulated in float32."""
    if not compute.in_8_bits or device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= (INTEGERS if compute is Compute.INT8 else CAPABILITY)


def check_device(compute: Compute, device: torch.device) -> None:
    """Refuse 8-bit products where the device has none.

    On the CPU they are emulated in float32, to try things out and to test.

    Raises:
        UnsupportedError: a GPU without 8-bit products.
    """
    if has_products(compute, device):
        return
    capability = torch.cuda.get_device_capability(device)
    needed = INTEGERS if compute is Compute.INT8 else CAPABILITY
    name, least, version = (
        torch.cuda.get_device_name(device),
        *(".".join(map(str, x)) for x in (needed, capability)),
    )
    other = "use compute = 'int8', or " * (capability >= INTEGERS)
    raise UnsupportedError(
        f"compute = '{compute}' needs compute capability {least} or newer, and {name} has {version}",
        f"{other}leave compute out (products in the model's dtype); load_in_4bit makes the model smaller there",
    )
