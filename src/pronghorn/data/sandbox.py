"""Chat templates under limits: a template is a program that comes with a stranger's model.

It runs in transformers' own sandbox, which keeps it from files and Python, and here its time and memory are bounded,
too: each round of a loop and each call is counted, and what could make a huge value from small ones is measured.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Sized
from functools import lru_cache, wraps
from typing import Any

from pronghorn.errors import UnsupportedError

MOST_CHARACTERS = 2**26
"""Of a rendering, and of any value on the way there."""
MOST_MADE = 2**30
"""Characters and items of all values that one rendering makes on the way."""
MOST_STEPS = 1_000_000
"""Rounds of loops and calls of one rendering."""
MOST_SECONDS = 20.0
MOST_WIDTH = 100_000
"""Of what is padded, indented, rounded or cut into batches."""
MOST_BITS = 1_000_000
"""Of an integer."""

OPERATORS = {"+": operator.add, "*": operator.mul, "**": operator.pow, "%": operator.mod}
_WIDTHS = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "to_bytes", "zfill"}
_WIDE_FORMAT = re.compile(r"\d{6}|%[^%a-zA-Z]*\*|\{[^{}]*\{")


class LimitError(Exception):
    """A template that takes more than a chat template may."""


class _Limits:
    """What one rendering took so far."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._steps = self._made = 0
        self._deadline = time.monotonic() + MOST_SECONDS

    def step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise LimitError(f"goes on after {MOST_STEPS:,} rounds of its loops")
        if time.monotonic() > self._deadline:
            raise LimitError(f"takes longer than {MOST_SECONDS:g} s")

    def measured(self, value: Any) -> Any:
        """Count a value that the template made, and return it."""
        if isinstance(value, (str, list, tuple, dict)):
            size = len(value)
            self._made += size
            if size > MOST_CHARACTERS:
                self.fits(size)
            if self._made > MOST_MADE:
                raise LimitError(f"makes more than {MOST_MADE:,} characters")
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise LimitError(f"makes a number of more than {MOST_BITS:,} bits")
        return value

    @staticmethod
    def fits(characters: int) -> None:
        if characters > MOST_CHARACTERS:
            raise LimitError(f"makes a value of more than {MOST_CHARACTERS:,} characters")

    def concatenate(self, *parts: Any) -> str:
        """Compute the template's `~`."""
        return str(self.measured("".join(map(str, parts))))

    def operate(self, context: Any, sign: str, left: Any, right: Any) -> Any:
        """Compute one of the template's other operators on values."""
        if sign == "*":
            for many, of in ((left, right), (right, left)):
                if isinstance(many, int) and isinstance(of, Sized):
                    self.fits(many * len(of))
        elif sign == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MOST_BITS:
                raise LimitError(f"makes a number of more than {MOST_BITS:,} bits")
        elif sign == "%":
            self._check("format", [left])
        return self.measured(OPERATORS[sign](left, right))

    def filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or context before the value

        @wraps(function)  # with what tells jinja what to pass
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._check(name, [*args[skip:], *kwargs.values()])
            return self.measured(function(*args, **kwargs))

        return limited

    def call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def limited(context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            own = getattr(function, "__wrapped__", function)
            name, subject = getattr(own, "__name__", ""), getattr(own, "__self__", None)
            values = [subject, *args, *kwargs.values()]
            if name == "join" and isinstance(subject, str):
                values[:2] = values[1::-1]  # as the filter has them
            self._check(name, values)
            return self.measured(call(context, function, *args, **kwargs))

        return limited

    def _check(self, name: str, values: list[Any]) -> None:
        """Refuse a method or filter that would make a huge value of small ones; `values[0]` is what it is called on."""
        self.step()
        on = values[0] if values else None
        if name in _WIDTHS:
            width = max((abs(each) for each in values[1:] if isinstance(each, int)), default=0)
            if width > MOST_WIDTH:
                raise LimitError(f"pads, rounds or cuts to {width:.3g} > {MOST_WIDTH:,} places")
            if isinstance(on, str):
                texts = [len(each) for each in values[1:] if isinstance(each, str)]
                self.fits(max([width, *texts]) * (on.count("\n") + on.count("\t") + 1))
        elif name == "replace" and isinstance(on, str) and len(values) > 2:
            self.fits(on.count(str(values[1])) * len(str(values[2])))
        elif name == "join" and len(values) > 1 and isinstance(values[1], str):
            self.fits((len(on) if isinstance(on, Sized) else MOST_WIDTH) * len(values[1]))
        elif name in ("format", "format_map") and isinstance(on, str) and _WIDE_FORMAT.search(on):
            raise LimitError(f"formats with widths it should not have ({on[:40]!r})")


@lru_cache(maxsize=8)
def _compiled(text: str) -> tuple[Any, _Limits]:
    """Compile a template with its limits; raises what jinja does for one that is none."""
    from jinja2 import nodes, pass_context
    from jinja2.visitor import NodeTransformer
    from transformers import __version__
    from transformers.utils import chat_template_utils

    compile_template: Any = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is None:
        raise UnsupportedError(
            f"transformers {__version__} makes the sandbox of chat templates in another way",
            "install transformers 5.23",
        )
    limits = _Limits()
    environment = compile_template("").environment.overlay()  # transformers' own stays as it is
    environment.globals = {name: each for name, each in environment.globals.items() if name != "lipsum"}
    environment.filters = {name: limits.filter(name, each) for name, each in environment.filters.items()}
    environment.filters["pronghorn concatenate"] = lambda first, *others: limits.concatenate(first, *others)
    environment.filters["pronghorn step"] = pass_context(lambda *_: limits.step())  # never folded into a constant
    environment.call = limits.call(environment.call)
    environment.intercepted_binops, environment.call_binop = frozenset(OPERATORS), limits.operate

    class Counted(NodeTransformer):
        """Puts filters, which compiled templates call directly, into loops and macros and in the place of `~`."""

        def visit_Concat(self, node: Any) -> nodes.Node:
            self.generic_visit(node)
            first, *others = node.nodes
            return nodes.Filter(first, "pronghorn concatenate", others, [], None, None).set_lineno(node.lineno)

        def visit_For(self, node: Any) -> nodes.Node:
            self.generic_visit(node)
            step = nodes.Filter(nodes.Const(None), "pronghorn step", [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
            return node

        visit_Macro = visit_CallBlock = visit_For

    tree = Counted().visit(environment.parse(text)).set_environment(environment)
    template = environment.from_string(tree)
    template.globals = dict(template.globals)  # of a ChainMap, a rendering's context takes longer than the rendering
    return template, limits


def render(text: str, **values: Any) -> str:
    """Render the template `text` as `apply_chat_template` would.

    Raises:
        LimitError: it takes more than it may. TemplateError and whatever else it fails with: as jinja does.
    """
    template, limits = _compiled(text)
    limits.begin()
    pieces, size = [], 0
    for piece in template.generate(values):
        size += len(piece)
        if size > MOST_CHARACTERS:
            raise LimitError(f"writes more than {MOST_CHARACTERS:,} characters")
        pieces.append(piece)
    return "".join(pieces)
