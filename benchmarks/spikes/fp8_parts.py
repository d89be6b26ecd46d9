"""Which of a model's linears cost what in 8 bits: held-out loss before training, products emulated in float32.

    python -m benchmarks.spikes.fp8_parts --model SMOLLM2_FOLDER --data gsm8k/ --documents 24 --out parts.json

Weights and inputs are rounded to e4m3 with a scale a row, as `compute="fp8"` does, in those linears alone; no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.accuracy import documents, load, read
from benchmarks.program import parser_of, run
from benchmarks.record import check_out
from pronghorn.device import versions
from pronghorn.kernels.quantise import quantise_rows

MIXER, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")
PARTS: dict[str, Callable[[str, int, int], tuple[bool, bool]]] = {
    "none": lambda kind, layer, layers: (False, False),
    "all": lambda kind, layer, layers: (True, True),
    "all, weights only": lambda kind, layer, layers: (True, False),
    "all, inputs only": lambda kind, layer, layers: (False, True),
    "MLP": lambda kind, layer, layers: (kind in MLP,) * 2,
    "attention": lambda kind, layer, layers: (kind in MIXER,) * 2,
    "q and k": lambda kind, layer, layers: (kind in ("q", "k"),) * 2,
    "v": lambda kind, layer, layers: (kind == "v",) * 2,
    "o": lambda kind, layer, layers: (kind == "o",) * 2,
    "gate and up": lambda kind, layer, layers: (kind in ("gate", "up"),) * 2,
    "down": lambda kind, layer, layers: (kind == "down",) * 2,
    "all but the first and last two layers": lambda kind, layer, layers: (2 <= layer < layers - 2,) * 2,
}
"""Whether a linear's weight and its input are in 8 bits, by its kind, its layer and the number of layers."""


def rounded(x: Tensor) -> Tensor:
    """Return x as e4m3 by rows has it."""
    codes, scales = quantise_rows(x.flatten(0, -2))
    return (codes.float() * scales.float().view(-1, 1)).view_as(x)


class Rounded:
    """Linears of a model whose weights and inputs are rounded as asked."""

    def __init__(self, model: nn.Module) -> None:
        names = {module: name for name, module in model.named_modules() if ".layers." in name}
        self.linears: list[Any] = [module for module in names if isinstance(module, nn.Linear)]
        self.own = [linear.weight.data for linear in self.linears]
        self.coded = [rounded(weight) for weight in self.own]
        self.kinds = [names[linear].rpartition(".")[2].removesuffix("_proj") for linear in self.linears]
        self.numbers = [int(names[linear].partition(".layers.")[2].partition(".")[0]) for linear in self.linears]
        self.inputs: dict[nn.Module, bool] = {}
        for linear in self.linears:
            linear.register_forward_pre_hook(
                lambda module, args: (rounded(args[0]),) if self.inputs.get(module) else None
            )

    def set(self, part: Callable[[str, int, int], tuple[bool, bool]]) -> None:
        """Round these and no others."""
        layers = max(self.numbers) + 1
        for linear, own, coded, kind, number in zip(
            self.linears, self.own, self.coded, self.kinds, self.numbers, strict=True
        ):
            weight, self.inputs[linear] = part(kind, number, layers)
            linear.weight.data = coded if weight else own


@torch.no_grad()
def loss_of(model: Any, texts: list[tuple[list[int], list[int]]]) -> float:
    """Return the mean loss a supervised token, a document at a time."""
    total, count = 0.0, 0
    for ids, labels in texts:
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        target = torch.tensor(labels[1:])
        total += cross_entropy(logits, target, reduction="sum").item()
        count += int((target >= 0).sum())
    return total / count


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder, or the package that carries a GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="as benchmarks.accuracy takes it")
    parser.add_argument("--documents", type=int, default=24, help="that are held out")
    return parser


def main(given: argparse.Namespace) -> None:
    """Print each part's loss and what it costs; write one JSON object."""
    check_out(given.out)
    model, tokenizer = load(given.model)
    texts = documents(read(given.data, given.documents)[1], tokenizer)
    linears, found = Rounded(model.float().eval()), dict[str, dict[str, float]]()
    for name, part in PARTS.items():
        linears.set(part)
        loss = loss_of(model, texts)
        found[name] = {"loss": round(loss, 4), "costs": round(loss - found.get("none", {"loss": loss})["loss"], 4)}
        print(name, found[name], flush=True)
    labels = sum(label >= 0 for _, each in texts for label in each[1:])
    report = {"data": given.data.stem, "documents": len(texts), "labels": labels, "parts": found}
    report |= {"device": "cpu", "versions": versions(), "commit": given.commit}
    report["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run(arguments, main)
