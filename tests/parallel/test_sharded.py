"""Two processes share the frozen weights of a model's layers, and compute what one does with all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pronghorn.errors import PronghornError, UnsupportedError
from pronghorn.kernels import nf4
from pronghorn.kernels.fp8_blocks import FP8Tensor
from pronghorn.layers.linears import is_written_out
from pronghorn.loading.share import share_layers
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attach, attached
from pronghorn.models.families import base_causal_lm
from pronghorn.parallel.sharded import BUFFERS, sharded
from pronghorn.parity.distance import relative_error
from pronghorn.precision.compute import Compute
from pronghorn.train.checkpoint import Fingerprint
from support.generic import generic_model
from support.processes import WORLD, alone, selected, together
from support.tiny import in_4_bits, packed_row, tiny_model
from support.tolerance import assert_three_way

PLANS = {"keep": None, "recompute": Plan.recompute(), "offload": Plan.offload()}
CASES = [
    *(("llama", layers, plan) for layers in ("stock", "fused") for plan in PLANS),
    ("qwen2", "fused", "keep"),  # with biases
    ("qwen2 nf4", "fused", "recompute"),
    *(("qwen2 fp8_both", "fused", plan) for plan in PLANS),  # codes of 8-bit products, turned for each backward
    *(("qwen2 fp8", "fused", plan) for plan in PLANS),  # codes written out of 16 bits for each backward
    ("qwen2 nf4 fp8", "fused", "recompute"),
    ("qwen2 nf4 fp8_both", "fused", "keep"),
    ("llama blocks fp8", "fused", "recompute"),  # a checkpoint's codes, of blocks
    ("qwen3_5_text", "fused", "recompute"),
    ("gemma4_text", "fused", "keep"),  # later layers read earlier ones' keys and values
    ("qwen3_moe", "fused", "offload"),
    ("gpt_oss", "stock", "keep"),
]
QUICK = [CASES[index] for index in (0, 4, 7, 10, 12, 14, 15, 16, 17, 18, 19)]
"""Each plan, stock and fused, weights in 4 and codes in 8 bits, each kind of layer."""

MOVED = ["llama", "qwen2 nf4", "qwen3_moe nf4", "llama blocks fp8", "opt"]
"""Constants of blocks, the parts of experts in few bits and scales of rows are read by what isn't a parameter. OPT
calls its decoder past the backbone."""


FEW_BITS = ["llama nf4", "llama nf4 fp8", "llama blocks", "llama blocks fp8"]


def in_few_bits(model: Any, stored: list[str]) -> Any:
    """Store the linears of the layers in NF4, or in 8 bits with a scale a block, as asked."""
    if "nf4" in stored:
        in_4_bits(model)
    if "blocks" in stored:
        drawn = torch.Generator().manual_seed(0)
        for linear in (each for each in model.model.layers.modules() if type(each) is torch.nn.Linear):
            blocks = -(-linear.out_features // 16), -(-linear.in_features // 16)
            scales = torch.rand(blocks, generator=drawn) / 1000
            codes = torch.randn(linear.weight.shape, generator=drawn).mul(50).to(torch.float8_e4m3fn)
            packed = FP8Tensor([codes, scales], linear.weight.shape, torch.bfloat16, 16, 16)
            linear.weight = torch.nn.Parameter(packed, requires_grad=False)
    return model


def written_out(model: Any) -> None:
    """Write linears in few bits out, to the numbers that they stand for."""
    for holder in list(model.model.layers.modules()):
        for name, linear in [(name, each) for name, each in holder.named_children() if is_written_out(each)]:
            weight = linear.weight
            dense = torch.empty(linear.out_features, linear.in_features)
            if isinstance(weight, FP8Tensor):
                weight.write_out(dense)
            else:
                nf4.write_out_reference(nf4.NF4Weight.of(weight), dense)
            plain = torch.nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
            plain.weight, plain.bias = torch.nn.Parameter(dense, requires_grad=False), linear.bias
            setattr(holder, name, plain)
    model.is_loaded_in_4bit = False


def adapted(name: str) -> Any:
    from peft import LoraConfig, get_peft_model

    family, *stored = name.split()
    model = generic_model(family, dropout=0.0) if family == "opt" else None
    model = model or tiny_model(family, **({"intermediate_size": 128} if compute_of(name) != "dtype" else {}))
    if compute_of(name) != "dtype":
        model.to(torch.bfloat16)
    in_few_bits(model, stored)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    return model


def layers_of(name: str) -> str:
    return "stock" if name == "opt" else "fused"


def compute_of(name: str) -> str:
    return next((each for each in name.split() if each.startswith("fp8")), "dtype")


def gradients(model: Any, layers: str, plan: Plan | None, compute: str = "dtype") -> dict[str, Tensor]:
    """Return those of two micro-batches, with a forward that keeps nothing after each, and the losses."""
    handle = attach(model, plan, layers=layers, compute=compute)
    losses = []
    for seed in (0, 1):
        loss = model(**packed_row([1, 20, 27], 48, seed=seed)).loss
        loss.backward()
        with torch.no_grad():
            model(**packed_row([48], 48, seed=3))
        losses.append(loss.detach())
    if compute != "dtype":
        in_8_bits, linears = handle.layers.in_8_bits()
        assert in_8_bits == linears > 0
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses), **found}


def refusals(model: Any, folder: Path) -> list[str]:
    """Return why a shared model is not detached, merged, or trained on elsewhere."""
    from pronghorn.export.merge import save_merged

    handle = attach(model, layers="fused")
    messages = []
    for refused in (
        handle.detach,
        lambda: save_merged(model, None, folder),
        lambda: gradients(model.double(), "fused", None),
    ):
        try:
            refused()
            messages.append("")
        except PronghornError as error:
            messages.append(str(error))
    return messages


def worker(cases: list[tuple[str, str, str]], rank: int, folder: Path) -> None:
    cpu = torch.device("cpu")
    for case in cases:
        name, layers, plan = case
        model = adapted(name)
        before = Fingerprint.of(model)
        share_layers(model, cpu, compute=Compute.of(compute_of(name)))
        told: dict[str, Any] = {"same": Fingerprint.of(model) == before, "bytes": sharded(base_causal_lm(model)).bytes}
        told["gradients"] = gradients(model, layers, PLANS[plan], compute_of(name))
        torch.save(told, folder / f"{'-'.join(case)}-{rank}.pt")
    for name in MOVED:
        model = adapted(name)
        before = Fingerprint.of(model)
        share_layers(model, cpu, compute=Compute.of(compute_of(name)))
        model.to("cpu:0")  # by another name of the same device, as trainers do: a copy, which is put back
        found = gradients(model, layers_of(name), None, compute_of(name))
        told = {"same": Fingerprint.of(model) == before, "gradients": found}
        torch.save(told, folder / f"moved-{name}-{rank}.pt")
    model = adapted("llama")
    share_layers(model, cpu)
    torch.save(refusals(model, folder / f"merged-{rank}"), folder / f"refused-{rank}.pt")
    model = adapted("qwen3_moe fp8")
    share_layers(model, cpu, compute=Compute.FP8)
    found = gradients(model, "fused", None, "fp8")
    torch.save({"report": str(attached(model).report), "gradients": found}, folder / f"experts-{rank}.pt")


@pytest.fixture(scope="module")
def shared_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    together(partial(worker, selected(request, "case")), folder)
    return folder


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "case", [pytest.param(case, id="-".join(case), marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_shared_layers_give_the_gradients_of_whole_ones(shared_runs: Path, case: tuple[str, str, str]) -> None:
    name, layers, plan = case
    model = adapted(name)
    of_layers = [p for p in base_causal_lm(model).model.layers.parameters() if not p.requires_grad]
    whole = sum(p.nbytes for p in of_layers)
    expected = gradients(model, layers, PLANS[plan], compute_of(name))
    for rank in range(WORLD):
        found = torch.load(shared_runs / f"{'-'.join(case)}-{rank}.pt")
        assert found["same"], "the fingerprint of a checkpoint is of the model, not of what buffers hold"
        layer = whole / len(base_causal_lm(model).model.layers)
        stored = 0.6 if name == "qwen2 fp8_both" else 1.0  # a byte of two, and the norms
        assert found["bytes"] <= 1.1 * stored * (whole / WORLD + BUFFERS * layer) + 2**14
        same(found["gradients"], expected)


def test_shared_experts_multiply_in_the_models_dtype_and_the_report_says_so(shared_runs: Path) -> None:
    expected = gradients(adapted("qwen3_moe fp8"), "fused", None, "fp8")  # with experts in 8 bits
    for rank in range(WORLD):
        told = torch.load(shared_runs / f"experts-{rank}.pt", weights_only=False)
        assert "(experts apart: processes share their weights)" in told["report"]
        assert torch.equal(told["gradients"]["losses"], expected["losses"]), "the forward is in the model's dtype"
        errors = [relative_error(told["gradients"][name], value) for name, value in expected.items()]
        assert 0 < max(errors) < 0.1


@pytest.mark.parametrize(
    ("name", "shared", "asked"),
    [
        ("llama fp8", "dtype", "fp8"),
        ("llama fp8", "fp8", "fp8_both"),
        ("llama nf4 fp8", "dtype", "fp8_both"),
        ("llama blocks fp8", "dtype", "fp8"),
    ],
)
def test_layers_that_are_shared_for_other_products_are_refused(name: str, shared: str, asked: str) -> None:
    """What lies in the buffers then may be another layer's: codes of it would be wrong."""
    with alone():
        model = adapted(name)
        share_layers(model, torch.device("cpu"), compute=Compute.of(shared))
        with pytest.raises(UnsupportedError, match=f"compute = '{asked}', and processes share the layers' weights"):
            attach(model, layers="fused", compute=asked)


def test_dora_over_4_bits_is_refused_on_the_cpu() -> None:
    """There PEFT gives the linear another parameter in each forward, and trainers would move that one alone."""
    from peft import LoraConfig, get_peft_model

    with alone():
        model = get_peft_model(in_4_bits(tiny_model("llama")), LoraConfig(target_modules="all-linear", use_dora=True))
        with pytest.raises(UnsupportedError, match="DoRA over 4 bits in layers that processes share, on the CPU"):
            share_layers(model, torch.device("cpu"))


@pytest.mark.parametrize("name", MOVED)
def test_weights_that_were_moved_are_put_back(shared_runs: Path, name: str) -> None:
    expected = gradients(adapted(name), layers_of(name), None, compute_of(name))
    for rank in range(WORLD):
        found = torch.load(shared_runs / f"moved-{name}-{rank}.pt")
        assert found["same"]
        same(found["gradients"], expected)


def test_what_a_shared_model_can_not_do_is_refused(shared_runs: Path) -> None:
    for rank in range(WORLD):
        detached, merged, moved = torch.load(shared_runs / f"refused-{rank}.pt")
        assert detached.startswith("detaching needs all of the model's weights, and each of 2 processes has a part")
        assert merged.startswith("merging needs all of the model's weights, and each of 2 processes has a part")
        assert "weights that 2 processes share were moved to cpu as torch.float64" in moved


def on_one_process(name: str, plan: str, shared: bool, device: torch.device, compute: str) -> dict[str, Tensor]:
    """Return the gradients of two rows, by a model of six wider layers."""
    from pronghorn.models.lora import add_lora

    family, *stored = name.split()
    wide: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 6, "head_dim": 64}
    wide |= {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096}
    model = in_few_bits(tiny_model(family, **wide).to(torch.bfloat16), stored)
    if "float32" in stored:
        written_out(model)
    if not shared or "nf4" in stored:  # what is in 4 bits is where it will be
        model.to(device)
    model = add_lora(model, r=8)
    if "float32" in stored:
        model.float()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if "lora_B" in name):
            parameter.copy_(torch.randn(parameter.shape) * 0.05)
    if shared:
        share_layers(model, device, compute=Compute.of(compute))
    attach(model, PLANS[plan], layers="fused", graph="off", compute=compute)
    for seed in (0, 1):
        row = {name: value.to(device) for name, value in packed_row([1, 200, 1847], 2048, seed=seed).items()}
        model(**row).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.gpu
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "llama fp8", "llama fp8_both", *FEW_BITS])
def test_gathers_beside_compute_are_waited_for_on_a_gpu(name: str, plan: str, tmp_path: Path) -> None:
    """One process is enough: its gathers copy, on a stream of their own, into buffers that other layers were in."""
    run = partial(on_one_process, plan=plan, device=torch.device("cuda", torch.cuda.current_device()))
    expected = run(name, shared=False, compute=compute_of(name))
    base = name.removesuffix(f" {compute_of(name)}")
    exact = run(f"{base} float32", shared=False, compute="dtype")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        found = run(name, shared=True, compute=compute_of(name))
    finally:
        dist.destroy_process_group()
    assert found.keys() == expected.keys()
    for key, value in expected.items():  # whole weights are merged and multiplied at once, with other roundings
        assert_three_way(key, found[key], value, exact[key])
