"""Questions about Python's standard library with the documentation's answers, made from the running interpreter.

    {"messages": [{"role": "user", "content": "What does `textwrap.dedent` do?"},
                  {"role": "assistant", "content": "textwrap.dedent(text)\\n\\nRemove any common leading ..."}]}

Sources: signatures and docstrings of the public functions, classes and methods, and the entries of `pydoc_data.topics`.
Nothing is downloaded. `prepare.py` runs this file in an interpreter without site-packages, because libraries patch the
standard library when they are imported. Training and held-out rows come from different modules, and held-out rows that
share most of their wording with training rows are left out: the held-out loss measures form, not memory.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import random
import re
import secrets
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# importing these opens windows, prints, or needs another platform; tests are no documentation
# fmt: off
SKIPPED = frozenset({
    "antigravity", "curses", "distutils", "ensurepip", "idlelib", "lib2to3", "msilib", "msvcrt", "nis", "nt",
    "ntpath", "nturl2path", "ossaudiodev", "pty", "pydoc_data", "readline", "rlcompleter", "site", "spwd",
    "test", "this", "tkinter", "tty", "turtle", "turtledemo", "venv", "winreg", "winsound",
})
SUBMODULES = (
    "asyncio.subprocess", "collections.abc", "concurrent.futures", "email.message", "email.policy",
    "email.utils", "html.parser", "http.client", "http.cookies", "http.server", "importlib.metadata",
    "importlib.resources", "importlib.util", "json.decoder", "json.encoder", "logging.config",
    "logging.handlers", "multiprocessing.pool", "multiprocessing.shared_memory", "os.path", "unittest.mock",
    "urllib.parse", "urllib.request", "urllib.robotparser", "wsgiref.util", "xml.dom.minidom",
    "xml.etree.ElementTree", "xml.sax.saxutils",
)
# fmt: on
ALWAYS_HELD_OUT = frozenset({"queue", "textwrap"})  # the recipes' sample prompts ask about it
HELD_OUT_SHARE = 0.08
MOST_CHARACTERS = 900  # of an answer; keeps a whole conversation under 512 tokens
SHARED_WORDING = 0.5  # a held-out answer with more of its four-word runs in the training rows is dropped
QUESTIONS = (
    "What does `{name}` do?",
    "How do I use `{name}` in Python?",
    "Explain `{name}` from Python's standard library.",
    "Give the signature and a short description of `{name}`.",
    "What is the {kind} `{name}` for?",
    "Describe `{name}`.",
    "How is `{name}` called, and what does it do?",
    "Document the Python {kind} `{name}`.",
)


@dataclass(frozen=True)
class Entry:
    """One documented thing: `group` is its top-level module (or topic), by which the data are split."""

    group: str
    name: str
    kind: str
    signature: str
    text: str

    @property
    def answer(self) -> str:
        """The signature, a blank line, the description."""
        return f"{self.signature}\n\n{self.text}"


def write_dataset(folder: Path, seed: int = 3407) -> tuple[int, int]:
    """Write `train.jsonl` and `eval.jsonl` into `folder`; the same seed and Python give the same files.

    Returns:
        The rows of each.
    """
    training, held_out = build(seed)
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, entries in (("train.jsonl", training), ("eval.jsonl", held_out)):
        lines = [json.dumps(_row(entry, rng), ensure_ascii=False) + "\n" for entry in entries]
        writing = folder / f".{name}.{secrets.token_hex(8)}.tmp"
        with writing.open("x", encoding="utf-8") as file:  # x follows no link
            file.writelines(lines)
        writing.replace(folder / name)
    return len(training), len(held_out)


def build(seed: int = 3407) -> tuple[list[Entry], list[Entry]]:
    """Training and held-out entries, shuffled, of different modules."""
    entries = list(_unique([*_module_entries(), *_topic_entries()]))
    groups = sorted({entry.group for entry in entries})
    rng = random.Random(seed)
    rng.shuffle(groups)
    held_groups = set(ALWAYS_HELD_OUT)
    for group in groups:
        held = sum(entry.group in held_groups for entry in entries)
        size = sum(entry.group == group for entry in entries)
        if held + size <= HELD_OUT_SHARE * len(entries) and size <= 0.02 * len(entries):  # many modules, not one big
            held_groups.add(group)
    training = [entry for entry in entries if entry.group not in held_groups]
    held_out = [entry for entry in entries if entry.group in held_groups]
    seen = {run for entry in training for run in _runs(entry.text)}
    held_out = [entry for entry in held_out if _share(entry, seen) <= SHARED_WORDING]
    rng.shuffle(training)
    rng.shuffle(held_out)
    return training, held_out


def _row(entry: Entry, rng: random.Random) -> dict[str, Any]:
    question = rng.choice(QUESTIONS).format(name=entry.name, kind=entry.kind)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": entry.answer}]}


def _runs(text: str) -> list[str]:
    """All runs of four words of a text (the text itself, if it is shorter)."""
    words = re.findall(r"\w+", text.lower())
    return [" ".join(words[at : at + 4]) for at in range(max(len(words) - 3, 1))]


def _share(entry: Entry, seen: set[str]) -> float:
    runs = _runs(entry.text)
    return sum(run in seen for run in runs) / len(runs)


def _unique(entries: list[Entry]) -> Iterator[Entry]:
    """The first entry of each name and of each text: aliases and platform twins repeat both."""
    names, texts = set(), set()
    for entry in entries:
        if entry.name not in names and entry.text not in texts:
            names.add(entry.name)
            texts.add(entry.text)
            yield entry


def _module_entries() -> Iterator[Entry]:
    names = [name for name in sys.stdlib_module_names if not name.startswith("_") and name not in SKIPPED]
    for name in sorted([*names, *SUBMODULES]):
        module = _import(name)
        if module is not None:
            yield from _members(module, name)


def _import(name: str) -> ModuleType | None:
    """The module, or None if this platform or build hasn't it; silent, whatever it says while it is imported."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except (Exception, SystemExit):
            return None


def _members(module: ModuleType, module_name: str) -> Iterator[Entry]:
    group = module_name.partition(".")[0]
    for name in sorted(getattr(module, "__all__", None) or vars(module)):
        thing = vars(module).get(name)
        home = str(getattr(thing, "__module__", "")).partition(".")[0].lstrip("_")
        if name.startswith("_") or home not in (group, "", "builtins", "io", "posix") or inspect.ismodule(thing):
            continue
        shown = name if module_name == "builtins" else f"{module_name}.{name}"
        if inspect.isclass(thing):
            yield from _entry(group, shown, "class", thing, bound=True)
            for method_name, method in sorted(vars(thing).items()):
                bound = isinstance(method, staticmethod | classmethod)
                method = getattr(thing, method_name, None) if bound else method
                if not method_name.startswith("_") and inspect.isroutine(method):
                    yield from _entry(group, f"{shown}.{method_name}", "method", method, bound=bound)
        elif inspect.isroutine(thing):
            yield from _entry(group, shown, "function", thing, bound=True)


def _entry(group: str, name: str, kind: str, thing: Any, bound: bool) -> Iterator[Entry]:
    """The thing's entry, or nothing where it has no signature or no text; a method that isn't `bound` loses `self`."""
    doc = thing.__doc__
    if not isinstance(doc, str):
        return
    doc = inspect.cleandoc(doc)
    try:
        signature = inspect.signature(thing)
        parameters = list(signature.parameters.values())
        arguments = str(signature if bound else signature.replace(parameters=parameters[1:]))
    except (ValueError, TypeError, AttributeError):  # a built-in: the documentation's first line often has it
        match = re.match(rf"(?:\w+\.)*{re.escape(name.rpartition('.')[2])}(\(.*\)(?: -> [\w ]+)?)", doc)
        if match is None:
            return
        arguments = match[1]
    for _ in range(2):  # a default like <function <lambda> at 0x7f...> differs every time
        arguments = re.sub(r"<[^<>]*>", "...", arguments)
    text = _tidy(doc, name.rpartition(".")[2], MOST_CHARACTERS - len(name) - len(arguments))
    if text:
        yield Entry(group, name, kind, _without_self(f"{name}{arguments}"), text)


def _topic_entries() -> Iterator[Entry]:
    """The entries "str.join(iterable)" + indented text of the language reference's topics."""
    topics = getattr(_import("pydoc_data.topics"), "topics", {})
    for topic, page in sorted(topics.items()):
        for match in re.finditer(r"^(?:class )?([a-z_]+\.\w+)(\(.*\))\n\n((?:   .*\n|\n)+)", page, re.MULTILINE):
            name, arguments, body = match.groups()
            text = _tidy(inspect.cleandoc(body), name, MOST_CHARACTERS - len(name) - len(arguments))
            if text:
                yield Entry(f"topic {topic}", name, "method", _without_self(f"{name}{arguments}"), text)


def _without_self(signature: str) -> str:
    """Nobody passes `self` or `cls`: left in, the model writes it into every function."""
    return re.sub(r"\((?:self|cls)(\[)?(?:, /)?(?:, |(?=\)))", r"(\1", signature, count=1)


def _tidy(doc: str, name: str, most: int) -> str:
    """The first paragraphs of a docstring, unwrapped, without examples and signatures, in at most `most` characters.

    Empty for less than 20 characters.
    """
    paragraphs: list[str] = []
    for paragraph in re.split(r"\n\s*\n", doc):
        if re.match(rf"(?:\w+\.)*{re.escape(name)}\(", paragraph):  # the signature again
            paragraph = paragraph.partition("\n")[2]
        if ">>>" in paragraph or paragraph.startswith((" ", "*", "=", "-")) or len(paragraphs) == 3:
            break
        if paragraphs and re.search(r"\n\s|:\s*$", paragraph):  # a list of parameters, or what an example follows
            break
        text = re.sub(r"\s+", " ", paragraph).strip()
        if re.match(r"(Added|Changed) in version|Deprecated since", text):
            break
        if text:
            paragraphs.append(text)
    text = "\n\n".join(paragraphs)
    if len(text) > most:
        text = text[: max(most, 0)]
        text = text[: max(text.rfind(". "), text.rfind(".\n")) + 1]
    return text if len(text) >= 20 else ""


if __name__ == "__main__":
    write_dataset(Path(sys.argv[1]))
