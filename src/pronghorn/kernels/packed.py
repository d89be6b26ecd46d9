"""Frozen weights that are stored in few bits and look like their dense tensor to whoever asks.

A model's parameter may be one: it has the dense shape and dtype, so that PEFT, transformers and `module.to` treat it as
any other. What Pronghorn computes reads the stored parts; any other operation on it gets the weight written out, which
is right and slow. It can't be written to or trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pronghorn.errors import UnsupportedError

_aten: Any = torch.ops.aten
_data: Any = Tensor.data
_KEEPING = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.lift_fresh.default}
"""Operations that return the same weight, or a copy of it, packed as it is."""


class PackedTensor(Tensor):
    """A weight in parts. A subclass says how they are written out, by `dequantise` or by `write_out`.

    Args:
        parts: tensors of one device, as they are stored.
        shape: of the dense weight.
        dtype: of the dense weight when it is written out.
        facts: what a subclass needs to know besides, plain values.
    """

    parts: tuple[Tensor, ...]
    facts: tuple[Any, ...]

    @staticmethod
    def __new__(cls: Any, parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, *facts: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=parts[0].device)

    def __init__(self, parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, *facts: Any) -> None:
        self.parts, self.facts = tuple(parts), facts

    def dequantise(self) -> Tensor:
        """Return the dense weight, in this tensor's dtype."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.write_out(out)
        return out

    def write_out(self, out: Tensor) -> None:
        """Write the dense weight into `out`, contiguous, in its dtype."""
        out.copy_(self.dequantise())

    @property
    def data(self) -> Tensor:
        """The weight without its history; another packed weight may be put in its place, and nothing else."""
        return _data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch would take a dense one without a word, and what reads the parts go on with the weight before
        if type(value) is not type(self):
            raise UnsupportedError(
                f"a {type(self).__name__}'s data can't be replaced by a {type(value).__name__}, as PEFT does "
                "for init_lora_weights 'pissa', 'corda' and their like, and where it merges DoRA",
                "load the model in 16 bits to change its weights",
            )
        _data.__set__(self, value)
        self.parts, self.facts = value.parts, value.facts

    @property
    def stored_bytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.nbytes for part in self.parts)

    def of_parts(self, parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> PackedTensor:
        """Return the same weight with other parts, on another device for instance."""
        return type(self)(parts, self.shape, dtype or self.dtype, *self.facts)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stored = f"{self.stored_bytes:,} bytes on {self.device}"
        return f"{type(self).__name__}({[*self.shape]}, dtype={self.dtype}, {stored})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = self.of_parts([part.clone() for part in self.parts])
        memo[id(self)] = copied = nn.Parameter(copied, False) if isinstance(self, nn.Parameter) else copied
        return copied

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"part{number}" for number in range(len(self.parts))]
        return names, (tuple(self.shape), self.dtype, *self.facts)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("part") and name[4:].isdigit() and "parts" in self.__dict__:
            return self.parts[int(name[4:])]
        raise AttributeError(name)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> PackedTensor:
        return cls([inner[name] for name in sorted(inner)], *context)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if torch.is_inference_mode_enabled() and isinstance(first, PackedTensor) and _gives_a_view(func):
            # a view of an ordinary tensor has to be one, too, and what inference mode writes out is none
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        if isinstance(first, PackedTensor) and func in _KEEPING:
            return first.of_parts([func(part, *args[1:], **kwargs) for part in first.parts])
        if isinstance(first, PackedTensor) and func is _aten._to_copy.default:
            moved = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking")}
            return first.of_parts([func(part, **moved) for part in first.parts], kwargs.get("dtype"))
        if func._schema.is_mutable and isinstance(first, PackedTensor):
            raise UnsupportedError(
                f"a {cls.__name__} can't be written to ({func})", "load the model in 16 bits to change its weights"
            )

        def written_out(value: Any) -> Any:
            return value.dequantise() if isinstance(value, PackedTensor) else value

        return func(*tree_map(written_out, args), **tree_map(written_out, kwargs))


def _gives_a_view(func: Any) -> bool:
    """Tell whether an operation returns views of what it is given."""
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


class PackedExperts(PackedTensor):
    """W [E, K, N] of a layer's experts, frozen."""

    @property
    def together(self) -> int:
        """How many experts a slice must be a multiple of, so that its statistics start where the parts' do."""
        return 1

    def experts(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return the dense weights [last - first, K, N] of these experts; `first` is a multiple of `together`."""
        raise NotImplementedError

    def dequantise(self) -> Tensor:
        return self.experts(0, len(self), self.dtype)
