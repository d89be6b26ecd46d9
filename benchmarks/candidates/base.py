"""Define what a candidate is, what it is asked to build, and the adapters that all candidates share."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from benchmarks.workload import Row
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.parity.parameters import trainable

Method = Literal["lora", "qlora", "full"]
Recompute = Literal["off", "on", "offload", "auto"]
Experts = Literal["frozen", "lora"]
RANK = 16
"""Rank of every LoRA; alpha is the same, so adapters are scaled by 1."""
LEARNING_RATE = 1e-5
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA_NET_TARGETS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
TARGETS_OF = {
    "lfm2": (*TARGETS[:3], "in_proj", "out_proj", "w1", "w2", "w3"),
    "starcoder2": (*TARGETS[:4], "c_fc", "c_proj"),
    "deepseek_v2": ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", *TARGETS[3:]),
}
"""Every linear of families whose linears have other names."""
DOCUMENTS_A_BATCH = 8
"""Documents in a batch of a candidate that can't pack."""


@dataclass(frozen=True)
class Spec:
    """What to build: the same for every candidate but for its name, its memory and its switches."""

    candidate: str
    checkpoint: str
    method: Method
    recompute: Recompute
    tokens: int
    """T of a row."""
    longest: int
    """Tokens of the longest document of any row: who compiles or captures needs one bound."""
    documents: int
    """The most documents in any row."""
    seed: int
    experts: Experts = "frozen"
    """Whether experts have adapters."""
    memory: int | None = None
    """Bytes of the GPU that the process may take; None for all."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Ablations of Pronghorn: arguments of `attach` by name."""

    @property
    def config(self) -> dict[str, Any]:
        """Read the checkpoint's config.json."""
        return json.loads((Path(self.checkpoint) / "config.json").read_text(encoding="utf-8"))

    @property
    def adapters(self) -> dict[str, Any]:
        """Return arguments of `peft.LoraConfig`: every linear; of a model with experts attention's, and the experts if
        asked."""
        routed = has_experts(self.config)
        targets = [*(TARGETS[:4] if routed else TARGETS)]
        kinds = self.config.get("layer_types") or ()
        targets += DELTA_NET_TARGETS if "linear_attention" in kinds else ()
        targets = TARGETS_OF.get(self.config["model_type"], targets)
        found = {"r": RANK, "lora_alpha": RANK, "target_modules": list(targets)}
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if routed and self.experts == "lora" else []
        return found | ({"target_parameters": experts} if experts else {})


@dataclass
class Built:
    """A model that is ready to train: `model(**make_batch(row)).loss`."""

    model: Any
    make_batch: Callable[[Row], dict[str, Any]]
    """Makes a row's arguments on the device, anew at every call, outside the clock."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know to judge the figures."""
    describe: Callable[[], list[str]] = list
    """Returns more notes, which may change while steps run."""


@dataclass(frozen=True)
class Candidate:
    """A way to train. Its library is imported by `prepare`, which its process times."""

    name: str
    requirements: Mapping[str, str]
    """Modules that must be importable, each with what pip installs it by."""
    prepare: Callable[[], None]
    """Imports the library as a user's script would."""
    build: Callable[[Spec], Built]
    needs_gpu: bool = False


class PaddedBatches:
    """Run a row's documents as a trainer without packing would: `DOCUMENTS_A_BATCH` at a time, padded to the longest.

    One loss is taken over all batches, so that a step computes what a packed step computes.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, batches: list[tuple[float, dict[str, Any]]]) -> Any:
        """Return `loss`: the mean over all labels, from each batch's own mean and its share of the labels."""
        return SimpleNamespace(loss=sum(self.model(**batch, use_cache=False).loss * share for share, batch in batches))

    @staticmethod
    def make_batch(row: Row) -> dict[str, Any]:
        """Make a row's batches, each with its share of the labels; batches without labels are left out."""
        import torch

        batches = []
        for first in range(0, len(row.bounds), DOCUMENTS_A_BATCH):
            bounds = row.bounds[first : first + DOCUMENTS_A_BATCH]
            longest = max(end - start for start, end in bounds)
            columns = {
                "input_ids": [[*row.input_ids[a:b], *[0] * (longest - b + a)] for a, b in bounds],
                "attention_mask": [[1] * (b - a) + [0] * (longest - b + a) for a, b in bounds],
                "labels": [[*row.labels[a:b], *[IGNORE_INDEX] * (longest - b + a)] for a, b in bounds],
            }
            share = sum(label != IGNORE_INDEX for labels in columns["labels"] for label in labels) / row.n_labels
            if share:
                batches.append((share, {name: torch.tensor(x, device=device()) for name, x in columns.items()}))
        return {"batches": batches}


def has_experts(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json's layers have experts."""
    return bool(config.get("num_experts") or config.get("num_local_experts"))  # Gemma 4's dense models say null


def set_adapters(model: Any, seed: int) -> None:
    """Give every adapter values that depend on the seed and its canonical name alone.

    A ~ N(0, 1/(3·in)) has the variance of PEFT's own start; B ~ N(0, 0.01²), since with B = 0 A has no gradient.
    """
    import torch

    with torch.no_grad():
        for name, parameter in trainable(model).items():
            if ".lora_" not in name:
                continue
            deviation = 0.01 if ".lora_B." in name else (3 * parameter.shape[1]) ** -0.5
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            parameter.copy_(torch.empty(parameter.shape).normal_(0, deviation, generator=generator))


def lora_model(shape: Mapping[str, Any], seed: int) -> Any:
    """Make a shape with transformers' own random weights in bf16 and LoRA on all linears, ready to train."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pronghorn.models.lora import add_lora

    torch.manual_seed(seed)
    with torch.device(device()):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.bfloat16)
    model = add_lora(model, r=RANK, lora_alpha=RANK, target_modules=TARGETS)
    set_adapters(model, seed)
    return model.train()


def device() -> Any:
    """Return the device that everything runs on."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def weights_dtype(method: Method) -> Any:
    """Return what the base's weights are loaded in: bf16 on a GPU; float32 where they are trained, and on the CPU."""
    import torch

    return torch.bfloat16 if torch.cuda.is_available() and method != "full" else torch.float32


def autocast_dtype(method: Method) -> Any:
    """Return bf16 for full fine-tuning on a GPU, else None. Its weights are float32: bf16 would round steps away."""
    import torch

    return torch.bfloat16 if method == "full" and torch.cuda.is_available() else None


def autocast(method: Method) -> Any:
    """Return the context of a forward: autocast to `autocast_dtype`, or none."""
    import torch

    dtype = autocast_dtype(method)
    return torch.autocast("cuda", dtype, enabled=dtype is not None)


def base_tensors(row: Row) -> dict[str, Any]:
    """Return what every causal LM takes: int64 [1, T] ids, labels, and positions that restart in each document."""
    import torch

    position_ids = torch.cat([torch.arange(length) for length in row.lengths])
    tensors = {"input_ids": torch.tensor(row.input_ids), "labels": torch.tensor(row.labels)}
    return {name: x[None].to(device()) for name, x in (tensors | {"position_ids": position_ids}).items()}
