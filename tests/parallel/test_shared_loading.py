"""Two processes share a model's layers while it loads: neither ever holds more than its part and one layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pronghorn.diagnose.shapes import byte_tokenizer
from pronghorn.kernels.packed import PackedTensor
from pronghorn.loading.load import find_model
from pronghorn.loading.share import SharedLoading, share_layers
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach
from pronghorn.models.families import base_causal_lm, decoder_layers
from pronghorn.models.lora import add_lora
from pronghorn.parallel.sharded import BUFFERS, IN_BUFFER, sharded
from pronghorn.precision.compute import Compute
from support.packed_checkpoints import mxfp4_checkpoint
from support.packed_linears import packed_linears
from support.processes import WORLD, gather_gradients, together
from support.tiny import packed_row, tiny_model

CPU = torch.device("cpu")
CASES = {
    "llama": True,
    "llama, all trained": True,
    "llama in 4 bits": True,
    "llama by fp8": True,
    "llama in 4 bits by fp8_both": True,
    "qwen3_5_text": True,
    "qwen2 in FP8": True,
    "gpt_oss in MXFP4": True,
    "qwen3_moe": True,
    "qwen3_moe in 4 bits": True,
    "mistral, its head twice": False,  # which follows rules that are transformers' own
}
"""And whether the house's loader shares each layer when it comes."""


def folder_of(case: str) -> str:
    return case.partition(" ")[0].rstrip(",")


def checkpoint(folder: Path, case: str) -> Path:
    name = folder_of(case)
    if case.endswith("MXFP4"):
        mxfp4_checkpoint(folder / name)
    elif case.endswith("FP8"):
        packed_linears(folder / name, "rows", name)
    else:
        tied = {"tie_word_embeddings": True} if case.endswith("twice") else {}
        model = tiny_model(name, eos_token_id=2, intermediate_size=128, **tied).to(torch.bfloat16)
        model.save_pretrained(folder / name)
        if tied:
            file = folder / name / "model.safetensors"
            save_file(
                {**load_file(file), "lm_head.weight": model.lm_head.weight.detach().clone()}, file, {"format": "pt"}
            )
        byte_tokenizer(512).save_pretrained(folder / name)
    return folder / name


class Watched(SharedLoading):
    """Notes the most bytes of layers that were whole at a time."""

    most = 0

    def arrived(self, name: str) -> None:
        parts = [part for p in base_layers(self._model).parameters() for part in stored(p)]
        self.most = max(self.most, sum(p.nbytes for p in parts if not (p.is_meta or hasattr(p, IN_BUFFER))))
        super().arrived(name)


def base_layers(model: Any) -> nn.ModuleList:
    return nn.ModuleList(decoder_layers(base_causal_lm(model)))


def stored(parameter: Any) -> list[Tensor]:
    state = getattr(parameter, "quant_state", None)
    if isinstance(parameter, PackedTensor):
        return list(parameter.parts)
    return [parameter] if state is None else [parameter, state.absmax]


def compute_of(case: str) -> str:
    return case.partition(" by ")[2] or "dtype"


def load(folder: Path, case: str, share: SharedLoading | None = None) -> Any:
    found = find_model(folder / folder_of(case), max_seq_length=128, load_in_4bit="4 bits" in case)
    return found.model(torch.float32 if compute_of(case) == "dtype" else torch.bfloat16, CPU, share)


def gradients(model: Any, share: bool, trained: bool, compute: str) -> dict[str, Tensor]:
    model = model if trained else add_lora(model, r=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if share:
        share_layers(model, CPU, compute=Compute.of(compute))
    handle = attach(model, Plan.recompute(), layers="fused", compute=compute)
    model.to("cpu:0")  # as a trainer's of several processes does: a copy
    loss = model(**packed_row([1, 20, 27], 48)).loss
    loss.backward()
    assert (handle.layers.in_8_bits()[0] > 0) is (compute != "dtype")
    gather_gradients(model)
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def worker(rank: int, folder: Path) -> None:
    for case in CASES:
        share = Watched(CPU, trained=case.endswith("trained"), compute=Compute.of(compute_of(case)))
        model = load(folder, case, share)
        shared = sharded(model)
        told: dict[str, Any] = {"while loading": shared is not None, "most": share.most}
        told["bytes"] = shared.bytes if shared is not None else 0
        told["gradients"] = gradients(model, True, case.endswith("trained"), compute_of(case))
        torch.save(told, folder / f"{case}-{rank}.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading")
    for case in CASES:
        checkpoint(folder, case)
    together(worker, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_layers_are_shared_as_they_come_and_compute_the_same(runs: Path, case: str) -> None:
    whole = load(runs, case)
    layers = [sum(part.nbytes for p in layer.parameters() for part in stored(p)) for layer in base_layers(whole)]
    expected = gradients(whole, False, case.endswith("trained"), compute_of(case))
    for rank in range(WORLD):
        told = torch.load(runs / f"{case}-{rank}.pt")
        assert told["while loading"] is CASES[case]
        if CASES[case]:
            # safetensors sorts a file by dtype, so codes of all its layers come after their norms and scales
            assert 0 < told["most"] <= (sum(layers) if case.endswith(("MXFP4", "FP8")) else max(layers))
            assert told["bytes"] <= 1.1 * (sum(layers) / WORLD + BUFFERS * max(layers)) + 2**16
        assert told["gradients"].keys() == expected.keys()
        assert all(torch.equal(told["gradients"][name], value) for name, value in expected.items())
