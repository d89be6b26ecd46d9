"""Addresses in kernels: an index times a size that can pass 2³¹ is computed in int64, found by reading the source.

A row of 500,000 tokens times 28,672 columns is 14 billion elements: no test can hold that, and the interpreter would
take days, so the kernels' expressions are read. Every product of a row, or of two numbers that are known at a launch
only, must have a factor that went through int64; those that can't pass 2³¹ are listed with their bound.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pronghorn.kernels import glu, residual, rms_norm
from pronghorn.kernels.quantise import quantise_rows

KERNELS = Path(__file__).parents[2] / "src" / "pronghorn" / "kernels"
BOUNDED = {
    "rows[:, None] * (GATE + UP)": "tokens times a rank of 128 at most",
    "rows[:, None] * RANK": "tokens times a rank of 128 at most",
    "(start + rows)[:, None] * H": "264 programs' sums of one row",
    "(row // rows)[:, None] * across": "scales of a weight's blocks",
    "experts * blocks": "experts times blocks of rows",
    "tensor * parts": "tensors times parts of each",
    "(adapter - ADAPTERS) * each": "parts of one adapter's rows of a rank",
    "V // TILE * TILE": "one row's logits",
    "T * RANK": "tokens times a rank of 32 at most",
    "key * q_head": "within one token",
    "key * k_head": "within one token",
    "head * v_head": "within one token",
    "tokens * TOKENS": "the row itself, which is made int64",
}
"""Products that stay below 2³¹ whatever fits on a GPU."""


class Kernel:
    """One kernel's names, by what is known of their size.

    Args:
        wide: parameters that every caller gives in int64.
    """

    def __init__(self, function: ast.FunctionDef, constants: set[str], wide: set[str]) -> None:
        annotated = {arg.arg for arg in function.args.args if arg.annotation is not None}
        annotated |= {ast.unparse(node.target) for node in ast.walk(function) if isinstance(node, ast.AnnAssign)}
        self.function, self.small, self.wide = function, constants | annotated, set(wide)
        while self._learn():
            pass

    def _learn(self) -> bool:
        before = len(self.small), len(self.wide)
        for node in ast.walk(self.function):
            if isinstance(node, ast.Assign):
                for target, value in self._pairs(node):
                    (self.wide if self.is_wide(value) else self.small if self.is_small(value) else set()).add(target)
            elif isinstance(node, ast.AugAssign | ast.For):
                value = node.value if isinstance(node, ast.AugAssign) else node.iter
                if isinstance(node.target, ast.Name) and self.is_wide(value):
                    self.wide.add(node.target.id)
        return before != (len(self.small), len(self.wide))

    @staticmethod
    def _pairs(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            values = node.value.elts if several else [node.value] * len(names)  # type: ignore[attr-defined]
            yield from ((name.id, each) for name, each in zip(names, values, strict=True) if isinstance(name, ast.Name))

    def is_wide(self, expression: ast.AST) -> bool:
        """Tell whether some factor went through int64 (or the numbers aren't indices at all)."""
        names = [node.id for node in ast.walk(expression) if isinstance(node, ast.Name)]
        types = {node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute)}
        return bool(types & {"int64", "float32", "dot", "load", "sigmoid"} or (self.wide | {"scale"}) & set(names))

    def is_small(self, expression: ast.AST) -> bool:
        """Tell whether it is known when a kernel is compiled, or within one tile."""
        if isinstance(expression, ast.Call):
            return ast.unparse(expression.func) == "tl.arange"
        if isinstance(expression, ast.Name):
            return expression.id in self.small
        if isinstance(expression, ast.BinOp):
            return self.is_small(expression.left) and self.is_small(expression.right)
        return isinstance(expression, ast.Constant) or (
            isinstance(expression, ast.Subscript) and self.is_small(expression.value)
        )

    def _addresses(self) -> list[ast.expr]:
        """List what pointers are made of: what is loaded and stored at, and what names in it were assigned."""
        nodes = list(ast.walk(self.function))
        calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
        found = [call.args[0] for call in calls if ast.unparse(call.func) in ("tl.load", "tl.store")]
        found += [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]
        found = [each for each in found if "ptr" in ast.unparse(each)]
        pairs = [pair for node in nodes if isinstance(node, ast.Assign) for pair in self._pairs(node)]
        for node in nodes:
            if isinstance(node, ast.AugAssign | ast.For) and isinstance(node.target, ast.Name):
                pairs.append((node.target.id, node.value if isinstance(node, ast.AugAssign) else node.iter))
        for _ in range(4):
            names = {node.id for each in found for node in ast.walk(each) if isinstance(node, ast.Name)}
            found += [
                value for name, value in pairs if (name in names or "ptr" in ast.unparse(value)) and value not in found
            ]
        return found

    def narrow(self) -> Iterator[str]:
        """Find the products that might pass 2³¹."""
        for node in (node for address in self._addresses() for node in ast.walk(address)):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)) or self.is_wide(node):
                continue
            sizes = self.is_small(node.left), self.is_small(node.right)
            names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
            of_rows = any(name in ("row", "rows", "token", "tokens", "T") for name in names)
            literal = isinstance(node.left, ast.Constant) or isinstance(node.right, ast.Constant)
            if not any(sizes) or (of_rows and not all(sizes) and not literal and not self._in_tile(node)):
                yield ast.unparse(node)

    def _in_tile(self, node: ast.BinOp) -> bool:
        """Tell whether the factor that isn't a size is an index within a tile."""
        index = node.left if self.is_small(node.left) else node.right
        return any(isinstance(each, ast.Name) and each.id in ("tokens", "rows", "TOKENS") for each in ast.walk(index))


def narrow_products(source: str) -> list[str]:
    """List the products of a module's kernels that aren't in int64, each with its kernel's name."""
    tree = ast.parse(source)
    assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    constants = {name.id for target in assigned for name in ast.walk(target) if isinstance(name, ast.Name)}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    jitted = [node for node in functions if any("jit" in ast.unparse(each) for each in node.decorator_list)]
    wide: dict[str, set[str]] = defaultdict(set)
    for _ in range(3):  # a kernel calls a function that calls another
        kernels = [Kernel(function, constants, wide[function.name]) for function in jitted]
        given: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for kernel in kernels:
            for call in (node for node in ast.walk(kernel.function) if isinstance(node, ast.Call)):
                callee = next((each for each in jitted if ast.unparse(call.func) == each.name), None)
                for arg, value in zip(callee.args.args if callee else (), call.args, strict=False):
                    assert callee is not None
                    given[callee.name, arg.arg].append(kernel.is_wide(value))
        for (function, arg), values in given.items():
            if all(values):
                wide[function].add(arg)
    return [f"{kernel.function.name}: {found}" for kernel in kernels for found in kernel.narrow()]


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.stem)
def test_addresses_of_long_rows_are_in_int64(path: Path) -> None:
    assert [each for each in narrow_products(path.read_text()) if each.split(": ")[1] not in BOUNDED] == []


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.stem)
def test_no_count_is_doubled_in_int32(path: Path) -> None:
    """A weight of more than 2³¹ numbers in 4 bits has a count of bytes that fits, and its double doesn't."""
    assert "2 * count" not in path.read_text()


TOKENS, WIDTH = 2**31 // 4096 + 700, 4096
"""More than 2³¹ elements: 4.3 GB in 16 bits."""


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["norm", "norm backward", "residual", "activation", "activation backward", "codes"])
def test_the_last_rows_of_a_tensor_beyond_int32_are_what_they_are_alone(kernel: str) -> None:
    """These kernels take each row by itself, so the bits are the same."""
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    weight, rstd = torch.ones(WIDTH, device="cuda"), torch.ones(TOKENS, 1, device="cuda")

    def run(rows: slice) -> torch.Tensor:
        own = x[rows].clone()
        if kernel == "norm":
            return rms_norm.forward(own, weight, 1e-6, 0.0)[0]
        if kernel == "norm backward":
            return rms_norm.backward(own, x[rows], weight, rstd[rows], 0.0, False)[0]
        if kernel == "residual":
            return residual.add_(own, x[rows], None, 0.5)
        if kernel == "activation":
            return glu.forward(own, "silu")
        if kernel == "activation backward":
            return glu.backward_(own[:, : WIDTH // 2].contiguous(), own, "silu", donated=True)
        return quantise_rows(own)[0].float()

    last = slice(TOKENS - 64, TOKENS)
    assert torch.equal(run(slice(0, TOKENS))[-64:], run(last))


KERNEL = """
@triton.jit
def _copy(x_ptr, y_ptr, stride, WIDTH, BLOCK: tl.constexpr):
    row = tl.program_id(0){cast}
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + row * WIDTH + cols, tl.load(_at(x_ptr, row, stride) + cols))

@triton.jit
def _at(x_ptr, row, stride):
    return x_ptr + row * stride
"""


def test_an_address_in_int32_is_seen_in_a_kernel_and_in_what_it_calls() -> None:
    assert narrow_products(KERNEL.format(cast="")) == ["_copy: row * WIDTH", "_at: row * stride"]
    assert narrow_products(KERNEL.format(cast=".to(tl.int64)")) == []
