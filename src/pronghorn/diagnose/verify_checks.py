"""What `verify` judges, the limit of each check, and the likely cause of what fails.

The limits are three-way (`parity.distance`). What isn't finite fails, in a limit too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.diagnose.verify_probe import Sight
from pronghorn.errors import UnsupportedError
from pronghorn.export import merge
from pronghorn.models.expert_gradients import RoutedTokens
from pronghorn.models.families import base_causal_lm
from pronghorn.parity.distance import THREE_WAY, BaselineNoise, Distance, distance, listed, mean_limit, ratio
from pronghorn.parity.parameters import canonical

_ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")


@dataclass(frozen=True)
class Passes:
    """What a pass over all rows came to; tensors on the host."""

    loss: float
    losses: list[Tensor]
    """[labels] of each document with labels; empty where the pass doesn't tell."""
    logits: Tensor
    """[R, V] at the compared positions; empty where the pass isn't asked for them."""
    gradients: dict[str, Tensor]
    dead: list[str]
    """Trained tensors with no gradient, a zero one, or one that is not finite."""
    experts: Check | None = None
    """Whether every expert that saw tokens trains; None where the pass doesn't tell, or none is trained."""

    @property
    def finite(self) -> bool:
        """Whether there is no infinity or NaN in all of it."""
        return all(bool(x.isfinite().all()) for x in (*self.losses, self.logits, *self.gradients.values()))


@dataclass(frozen=True)
class Check:
    """One verdict."""

    name: str
    ok: bool
    value: float
    limit: float
    detail: str


def loss(name: str, value: float, plain: Passes, exact: Passes) -> Check:
    """A mean loss against exact's."""
    error, limit = abs(value - exact.loss), mean_limit(plain.losses, exact.losses, exact.loss)
    return Check(name, ratio(error, limit) <= 1, error, limit, f"{value:.6f}, exact is {exact.loss:.6f}")


def logits(packed: Tensor, plain: Passes, exact: Passes) -> Check:
    """Logits out of the packed rows."""
    found = distance("logits", packed, plain.logits, exact.logits)
    return _of_distance("logits", found, f"{len(packed)} rows, relative L2 error {found.relative:.1e}")


def gradient_distances(ours: Passes, plain: Passes, exact: Passes, noise: BaselineNoise) -> list[Distance]:
    """Of every compared gradient, the one nearest to its limit first."""
    found = [distance(n, ours.gradients[n], plain.gradients[n], g, noise) for n, g in exact.gradients.items()]
    return sorted(found, key=lambda each: -each.excess)


def gradients(found: list[Distance], trained: int) -> Check:
    """The gradients of the tensors that are compared, of so many; `found` as `gradient_distances` returns it."""
    worst = found[0]
    wrong = [each.name for each in found if not each.excess <= 1]
    detail = f"{len(found)} of {trained} trained tensors; worst {worst.name}, relative L2 error {worst.relative:.1e}"
    return Check("gradients", not wrong, worst.excess, 1.0, f"off: {listed(wrong)}" if wrong else detail)


def dead(names: list[str], in_exact: list[str]) -> Check:
    """Tensors without a gradient that have one in the exact pass."""
    wrong = sorted(set(names) - set(in_exact))
    detail = f"no gradient, a zero or one that is not finite: {listed(wrong)}" if wrong else "every tensor has one"
    return Check("no dead gradient", not wrong, len(wrong), 0, detail)


def experts(routed: RoutedTokens) -> Check | None:
    """Experts that tokens went to and whose slice of a trained tensor has no gradient; None where none is trained."""
    if not any(routed.tensors()):
        return None
    wrong = [f"{canonical(name)}, expert {e} ({tokens} tokens)" for name, e, tokens in routed.untrained()]
    detail = f"every expert that saw tokens trains; {len(routed.idle())} saw none"
    return Check("experts train", not wrong, len(wrong), 0, f"no gradient: {listed(wrong)}" if wrong else detail)


def packed_or_alone(packed: Tensor, alone: tuple[list[int], Tensor], plain: Passes, exact: Passes) -> Check:
    """A document's logits among others and by itself, both through the attached model."""
    rows, logits = alone
    found = distance("", packed[rows].double() - logits.double() + exact.logits[rows].double(),
                     plain.logits[rows], exact.logits[rows])  # fmt: skip
    same = "bit-equal" if torch.equal(packed[rows], logits) else f"{len(rows)} rows"
    return _of_distance("packed as alone", found, same)


def sights(ours: list[Sight], plain: list[Sight]) -> Check:
    """What each layer's attention looks at, against transformers' own, document by document: exact."""
    wrong = [i for i, (a, b) in enumerate(zip(ours, plain, strict=True)) if a.outside or a.inside != b.inside]
    detail = f"the same tokens as transformers in all {len(ours)} layers"
    if wrong:
        layers = f"in layers {listed(list(map(str, wrong)))}"
        mine, right = ours[wrong[0]], plain[wrong[0]]
        if mine.outside:
            detail = f"a token is seen by another document {layers}"
        elif min(mine.inside, default=0) < min(right.inside):
            detail = f"a token is seen by those before it {layers}"
        else:
            detail = f"a token is seen by {len(mine.inside)} tokens and not by {len(right.inside)} {layers}"
    return Check("sight", not wrong, len(wrong), 0, detail)


def twice(ours: Passes, again: Passes, plain: Passes, exact: Passes, noise: BaselineNoise) -> Check:
    """The same accumulated batch a second time."""
    pairs = {name: (g.nan_to_num(), again.gradients[name].nan_to_num()) for name, g in ours.gradients.items()}
    apart = [name for name, (first, second) in pairs.items() if not torch.equal(first, second)]
    if not apart and ours.loss == again.loss:
        return Check("same twice", True, 0.0, 0.0, "loss and every gradient bit-equal")
    found = [
        distance(n, pairs[n][1].double() - pairs[n][0].double() + exact.gradients[n].double(),
                 plain.gradients[n], exact.gradients[n], noise)
        for n in apart
    ]  # fmt: skip
    repeat = loss("same twice", again.loss - ours.loss + exact.loss, plain, exact)
    worst = max(found, key=lambda each: each.excess, default=None)
    value = max(worst.excess if worst else 0.0, ratio(repeat.value, repeat.limit))
    most = max((each.relative for each in found), default=0.0)
    detail = f"{len(apart)} of {len(ours.gradients)} gradients not bit-equal, at most {most:.1e} apart (relative L2)"
    return Check("same twice", value <= 1, value, 1.0, detail)


def merged(model: Any) -> list[Check]:
    """The weights that `save_pretrained_merged` would write against W + s·B·A, each; [] for a model without LoRA."""
    base = base_causal_lm(model)
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "lora_A") and module.lora_A}
    if not adapted:
        return []
    own = base.get_input_embeddings().weight.dtype
    dtype = own if own in (torch.float16, torch.bfloat16) else torch.bfloat16
    try:
        state = merge.merged_state(base, dtype)
    except UnsupportedError as error:
        return [Check("merged weights", True, 0, 0, f"not checked: {error.problem}")]
    forgot: list[str] = []
    off: list[str] = []
    worst = 0.0
    for name, module in adapted.items():
        with torch.no_grad():
            of_experts = hasattr(module, "parameter_name")
            weight = module.get_param().float() if of_experts else merge.dense_weight(module.get_base_layer())
            right = weight + sum(_delta(module, a, weight) for a in module.active_adapters if a in module.lora_A)
            key = f"{name.replace('.base_layer', '')}.{module.parameter_name if of_experts else 'weight'}"
            written = state.pop(key).to(right.device)
            found = distance(name, written, right.to(dtype), right)
            worst = max(worst, found.excess)
            if not found.excess <= 1:
                (forgot if torch.equal(written, weight.to(dtype)) else off).append(name)
    detail = f"{len(adapted)} weights hold their adapter"
    if forgot or off:
        told = ((forgot, "forgot its adapter"), (off, "is not W + s·B·A"))
        detail = "; ".join(f"{what}: {listed(names)}" for names, what in told if names)
    return [Check("merged weights", not (forgot or off), worst, 1.0, detail)]


def _delta(module: Any, adapter: str, weight: Tensor) -> Tensor:
    """s·B·A of an adapter, of all experts where it is theirs, laid out as the weight is."""
    a, b = (part[adapter].weight.double() for part in (module.lora_A, module.lora_B))
    if weight.dim() == 2:
        return module.scaling[adapter] * (b @ a).float()
    count = len(weight)
    a, b = a.view(count, -1, a.shape[1]).float(), b.view(b.shape[0], -1, count).float()
    out = "eio" if module.get_base_layer().is_transposed else "eoi"
    return module.scaling[adapter] * torch.einsum(f"eri,ore->{out}", a, b)


def reloaded(logits: Tensor, differ: list[str], plain: Passes, exact: Passes) -> Check:
    """What was saved and loaded by plain transformers and PEFT against what was saved."""
    moved = logits.double() - plain.logits.double() + exact.logits.double()
    found = distance("", moved, plain.logits, exact.logits)
    equal = "logits bit-equal" if torch.equal(logits, plain.logits) else f"logits {found.relative:.1e} apart"
    check = _of_distance("saved and reloaded", found, f"trained tensors bit-equal, {equal}")
    if differ:
        return Check(check.name, False, check.value, check.limit, f"tensors that differ: {listed(differ)}")
    return check


def causes(
    found: dict[str, Check], gradients: list[Distance], from_first: bool, shift: Callable[[], int | None]
) -> Iterator[str]:
    """What is likely wrong, in words.

    Args:
        from_first: whether logits are off at the first token of a document, which sees nothing but itself.
        shift: by how many tokens labels are shifted; asked only if the loss is off and logits aren't.
    """
    failed = {name for name, check in found.items() if not check.ok}
    if "no dead gradient" in failed:
        yield f"adapter or weight that gets no gradient: {found['no dead gradient'].detail.split(': ')[1]}"
    if "experts train" in failed:
        yield f"an expert that never trains: {found['experts train'].detail.split(': ')[1]}"
    if "sight" in failed:
        told = found["sight"].detail
        yield f"{'leaking mask' if 'another document' in told else 'causal mask or sliding window'}: {told}"
    elif "packed as alone" in failed:
        yield "leaking mask: a document's logits depend on its neighbours"
    elif "logits" in failed and from_first:
        yield "forward pass: logits are off from a document's first token on (embeddings, norms, MLP or head)"
    elif "logits" in failed:
        yield "wrong RoPE position (or attention scale): logits are off from a document's second token on"
    elif failed == {"gradients"}:
        off = [each.name for each in gradients if not each.excess <= 1]
        if all(any(part in name for part in _ROTATED) for name in off):
            yield "wrong RoPE position (or attention scale): only gradients of queries and keys are off"
        else:
            yield f"backward pass: logits and loss are right, gradients are not: {listed(off)}"
    if "loss" in failed and "logits" not in failed:
        shifted = shift()
        if shifted in (0, 2):
            yield f"label shift: each token learns {'itself' if shifted == 0 else 'the one after the next'}"
        else:
            yield "loss: logits are right and the loss made of them is not"
    elif "accumulated loss" in failed and "loss" not in failed:
        yield "accumulation: a micro-batch's loss is not divided by the labels of the whole accumulated batch"
    if "same twice" in failed:
        yield f"not repeatable: {found['same twice'].detail}"


def file_causes(found: list[Check]) -> list[str]:
    """Likely causes in what is written."""
    told = {"merged weights": "merged weight", "saved and reloaded": "saving or loading:"}
    return [f"{told[check.name]} {check.detail}" for check in found if check.name in told and not check.ok]


def rows_off(packed: Tensor, plain: Passes, exact: Passes) -> Tensor:
    """bool [R], the rows whose logits are further off than plain's worst row may be."""
    right = exact.logits.double()
    ours, allowed = ((x.double() - right).square().mean(-1).sqrt() for x in (packed, plain.logits))
    return ~(ours <= THREE_WAY.limit(allowed.max().item(), right.abs().max().item()))


def _of_distance(name: str, found: Distance, detail: str) -> Check:
    by_rms = ratio(found.rms, found.rms_limit) >= ratio(found.maximum, found.maximum_limit)
    value, limit = (found.rms, found.rms_limit) if by_rms else (found.maximum, found.maximum_limit)
    return Check(name, found.excess <= 1, value, limit, detail)
