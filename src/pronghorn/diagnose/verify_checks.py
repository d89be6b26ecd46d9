"""Is the packed path right on this model and these documents? The checks on the passes of `verify_reference`.

Everything that ours computes may be as far from exact as the three-way rule of `parity.distance` allows. What isn't
finite fails, in a limit too. Products in 8 bits are judged against the same quantised operands; what 8 bits cost, the
cosines of gradients to float32's, is shown and fails nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pronghorn.device import device_name, versions
from pronghorn.diagnose.verify_reference import Passes, Run
from pronghorn.diagnose.verify_report import Cause, Check, Finding, Name, Report
from pronghorn.diagnose.verify_routing import Guides, References, choices, outputs
from pronghorn.diagnose.verify_subject import Subject
from pronghorn.errors import DataError, UnsupportedError
from pronghorn.export import merge
from pronghorn.export.merged_weights import dense_weight
from pronghorn.models.families import base_causal_lm
from pronghorn.models.probe import Isolation
from pronghorn.parity.distance import THREE_WAY, BaselineNoise, Distance, distance, listed, mean_limit, ratio
from pronghorn.parity.expert_outputs import TokenError, compared_outputs
from pronghorn.parity.own_code import replaced
from pronghorn.parity.visibility import Visibility
from pronghorn.precision.compute import Numbers
from pronghorn.text import counted

COSINE = 0.98
"""Of a gradient to float32's with nothing in 8 bits, at least, where the model's dtype itself reaches it."""
RULE = (
    f"{THREE_WAY.factor:.0f} times plain's own error from exact, and four roundings of float32 "
    "(pronghorn docs numerics)"
)
RULE_IN_8_BITS = (
    "plain and exact multiply the same operands in 8 bits; besides, each gradient's cosine to float32's without 8 bits "
    f"is shown beside {COSINE}"
)


def verify(subject: Subject, say: Callable[[str], None] = lambda text: None) -> Report:
    """Run the passes and judge them.

    Args:
        say: is given a line on what is being done.
    Raises:
        DataError: nothing is supervised.
        UnsupportedError: 4-bit weights in float32.
        TrainingError: the disk of temporary files is full.
    """
    started = time.perf_counter()
    if not subject.n_labels:
        raise DataError("the rows to verify hold no label", "give documents with trained tokens")
    say("loading")
    run = Run(subject)
    own = reference(replaced(base_causal_lm(run.model)))
    compute = subject.autocast or base_causal_lm(run.model).get_input_embeddings().weight.dtype
    wide = torch.float64 if compute is torch.float32 else torch.float32
    if wide is torch.float64 and any(hasattr(module, "compute_dtype") for module in run.model.modules()):
        raise UnsupportedError(
            "verify of 4-bit weights in float32 needs products in float64, which they have not",
            "set precision.dtype (or --dtype) to bfloat16",
        )
    plain_visibility = run.visibility(packed=False)
    coded, expert_products = run.coded_products(run.model), 2 * len(run.coded_experts(run.model))
    in_8_bits = len(coded) + expert_products
    of_forward = sum(rule.forward is not Numbers.DTYPE for _, rule in coded)
    of_forward += expert_products * subject.compute.forward_in_8_bits
    before = None if run.routed else References.run(run, wide, say, in_8_bits > 0, Guides())
    say("attached")
    subject.attach(run.model)
    run.with_other_weights()
    ours, again = run.ours(), run.ours("again")
    own_loss = run.own_loss()
    by_token = run.routed and not subject.compute.in_8_bits
    watching: AbstractContextManager[list[TokenError]] = nullcontext([])
    if by_token:
        watching = compared_outputs(run.model, wide)
    with watching as of_experts:
        packed = run.packed_logits()
    alone = run.alone_logits()
    of_products = [products(run.product_distances(), in_8_bits, of_forward)] if subject.compute.in_8_bits else []
    sight = isolation(run.isolation()) if run.is_generic else visibility(run.visibility(packed=True), plain_visibility)
    shift = run.shift() if before is None or not loss(Name.LOSS, own_loss, *before.loss).ok else None
    paths = run.paths()
    say("merged, saved and loaded again")
    guides = Guides.of(run.routes)
    of_files, saved = merged(run.model), run.reloaded(guides.logits())
    references = before or References.run(run.anew(), wide, say, in_8_bits > 0, guides)
    plain, exact = references.gradients
    noise = BaselineNoise.of(plain.gradients, exact.gradients)
    distances = gradient_distances(ours, plain, exact, noise)
    if any(each.rms <= each.rms_limit and not each.maximum <= each.maximum_limit for each in distances):
        noise = BaselineNoise.of(plain.gradients, exact.gradients, references.rounded(say))
        distances = gradient_distances(ours, plain, exact, noise)
    verdicts = [
        own,
        loss(Name.LOSS, own_loss, *references.loss),
        loss(Name.ACCUMULATED_LOSS, ours.loss, plain, exact),
        logits(packed, *references.logits),
        *of_products,
        gradients(distances, len(run.parameters)),
        dead(ours.dead, exact.dead),
        *([] if ours.untrained is None else [experts(ours.untrained, ours.idle)]),
        *([choices(references)] if run.routed else []),
        *([outputs(of_experts)] if by_token else []),
        packed_or_alone(packed, alone, *references.logits, references.alone[1]),
        sight,
        twice(ours, again, plain, exact, noise),
        *([] if references.unquantised is None else [cosines(ours, *references.unquantised)]),
    ]
    from_first = bool(rows_off(packed, *references.logits)[run.first_tokens].any())
    findings = list(likely_causes(verdicts, distances, from_first, shift, run.position_dependent))
    if not plain.finite:
        findings = [Finding(Cause.REFERENCE_OVERFLOWS)]
    if own.finding and not own.ok:
        findings = [own.finding]
    of_files = [*of_files, reloaded(*saved, *references.logits)]
    findings += [check.finding for check in of_files if not check.ok and check.finding]
    return Report(
        name=subject.name,
        findings=findings,
        checks=[*verdicts, *of_files],
        worst=distances[:10],
        tensors=len(distances),
        dtype=str(compute).removeprefix("torch."),
        reference=str(wide).removeprefix("torch."),
        rule=f"{RULE}; {RULE_IN_8_BITS}" if in_8_bits else RULE,
        rows=[[len(document) for document in row] for row in subject.rows],
        labels=subject.n_labels,
        paths=paths,
        device=device_name(),
        versions=versions(),
        seconds=time.perf_counter() - started,
    )


def reference(changed: list[str]) -> Check:
    """Check that plain and exact run what transformers, PEFT and torch wrote."""
    detail = f"replaced: {listed(changed)}" if changed else "transformers' own code"
    finding = Finding(Cause.REFERENCE_CHANGED, listed(changed))
    return Check(Name.REFERENCE, not changed, len(changed), 0, detail, finding)


def loss(name: Name, value: float, plain: Passes, exact: Passes) -> Check:
    """Check a mean loss against exact's."""
    error, limit = abs(value - exact.loss), mean_limit(plain.losses, exact.losses, exact.loss)
    return Check(name, ratio(error, limit) <= 1, error, limit, f"{value:.6f}, exact is {exact.loss:.6f}")


def logits(packed: Tensor, plain: Passes, exact: Passes) -> Check:
    """Check the logits out of the packed rows."""
    found = distance("logits", packed, plain.logits, exact.logits)
    return _of_distance(Name.LOGITS, found, f"{counted(len(packed), 'row')}, relative L2 error {found.relative:.1e}")


def products(compared: list[Distance], expected: int, of_forward: int) -> Check:
    """Check what each of so many weights' products in 8 bits give, in the backward and of some in the forward, for the
    same random rows."""
    wrong = [each.name for each in compared if not each.excess <= 1]
    worst = max(compared, key=lambda each: each.excess, default=None)
    forward = sum(each.name.endswith("(forward)") for each in compared)
    absent = max(expected - (len(compared) - forward), of_forward - forward)
    detail = f"off: {listed(wrong)}" if wrong else f"{absent} of {expected} are not in 8 bits"
    if not wrong and not absent:
        detail = f"{expected} of frozen weights" if worst else "none: layers aren't fused, or nothing in them is frozen"
    found = Finding(Cause.PRODUCTS, detail)
    return Check(Name.PRODUCTS, not (wrong or absent), worst.excess if worst else 0.0, 1.0, detail, found)


def cosines(ours: Passes, plain: Passes, exact: Passes) -> Check:
    """Check each gradient's cosine to exact's; both references have nothing in 8 bits here."""
    right = {name: gradient for name, gradient in exact.gradients.items() if gradient.any()}
    own, of_dtype = (
        {name: distance(name, run.gradients[name], plain.gradients[name], g).cosine for name, g in right.items()}
        for run in (ours, plain)
    )
    judged = [name for name in right if of_dtype[name] >= COSINE]
    low = [name for name in judged if not own[name] >= COSINE]
    detail = f"least {min(own.values()):.4f}, median {median(own.values()):.4f}; without 8 bits "
    detail += f"{min(of_dtype.values()):.4f} and {median(of_dtype.values()):.4f}"
    if len(judged) < len(right):
        detail += f"; {len(right) - len(judged)} not judged, which have less than {COSINE} without 8 bits, too"
    about = f"{len(low)} of {len(right)} gradients have a cosine below {COSINE} to float32's: {listed(low)}"
    least = min((own[name] for name in judged), default=1.0)
    return Check(Name.COSINE, not low, least, COSINE, detail, Finding(Cause.TOO_COARSE, about))


def gradient_distances(ours: Passes, plain: Passes, exact: Passes, noise: BaselineNoise) -> list[Distance]:
    """Compare every kept gradient; the one nearest to its limit comes first."""
    distances = [distance(n, ours.gradients[n], plain.gradients[n], g, noise) for n, g in exact.gradients.items()]
    return sorted(distances, key=lambda tensor: -tensor.excess)


def gradients(found: list[Distance], trained: int) -> Check:
    """Check the gradients that are compared, of so many; `found` as `gradient_distances` returns it."""
    worst = found[0]
    wrong = [each.name for each in found if not each.excess <= 1]
    detail = f"{len(found)} of {trained} trained tensors; worst {worst.name}, relative L2 error {worst.relative:.1e}"
    return Check(Name.GRADIENTS, not wrong, worst.excess, 1.0, f"off: {listed(wrong)}" if wrong else detail)


def dead(names: list[str], in_exact: list[str]) -> Check:
    """Check that every tensor with a gradient in the exact pass has one."""
    wrong = sorted(set(names) - set(in_exact))
    detail = f"no gradient, a zero or one that is not finite: {listed(wrong)}" if wrong else "every tensor has one"
    return Check(Name.DEAD, not wrong, len(wrong), 0, detail, Finding(Cause.NO_GRADIENT, listed(wrong)))


def experts(wrong: list[str], idle: int) -> Check:
    """Check that every expert that tokens went to has a gradient in its slice of every trained tensor."""
    detail = f"no gradient: {listed(wrong)}" if wrong else f"every expert that saw tokens trains; {idle} saw none"
    return Check(Name.EXPERTS, not wrong, len(wrong), 0, detail, Finding(Cause.EXPERT_NEVER_TRAINS, listed(wrong)))


def packed_or_alone(
    packed: Tensor, alone: tuple[list[int], Tensor], plain: Passes, exact: Passes, exact_alone: Passes
) -> Check:
    """Compare a document's logits among others and by itself, both through the attached model."""
    rows, logits = alone
    found = distance("", packed[rows].double() - logits.double() + exact_alone.logits[rows].double(),
                     plain.logits[rows], exact.logits[rows])  # fmt: skip
    same = "bit-equal" if torch.equal(packed[rows], logits) else counted(len(rows), "row")
    return _of_distance(Name.ALONE, found, same)


def visibility(ours: list[Visibility], plain: list[Visibility]) -> Check:
    """Check what each layer's tokens see against transformers' own, document by document: exact."""
    wrong = [(a, b) for a, b in zip(ours, plain, strict=True) if a.outside or a.inside != b.inside]
    detail, cause = f"the same tokens as transformers in all {len(ours)} layers", Cause.MASK_OR_WINDOW
    if wrong:
        layers = f"in layers {listed([str(a.layer) for a, _ in wrong])}"
        mine, right = wrong[0]
        if mine.outside:
            detail, cause = f"a token is seen by another document {layers}", Cause.MASK_LEAKS
        elif min(mine.inside, default=0) < min(right.inside):
            detail = f"a token is seen by those before it {layers}"
        else:
            detail = f"a token is seen by {counted(len(mine.inside), 'token')} and not by {len(right.inside)} {layers}"
    return Check(Name.VISIBILITY, not wrong, len(wrong), 0, detail, Finding(cause, detail))


def isolation(found: Isolation) -> Check:
    """Check that documents stay apart in a family whose layers aren't known, at the lengths of the long probe."""
    detail = f"{found}; {found.way}"
    return Check(Name.VISIBILITY, found.clean, found.error, found.tolerance, detail, Finding(Cause.MASK_LEAKS, detail))


def twice(ours: Passes, again: Passes, plain: Passes, exact: Passes, noise: BaselineNoise) -> Check:
    """Compare the same accumulated batch a second time."""
    pairs = {name: (g.nan_to_num(), again.gradients[name].nan_to_num()) for name, g in ours.gradients.items()}
    apart = [name for name, (first, second) in pairs.items() if not torch.equal(first, second)]
    if not apart and ours.loss == again.loss:
        return Check(Name.TWICE, True, 0.0, 0.0, "loss and every gradient bit-equal")
    found = [
        distance(n, pairs[n][1].double() - pairs[n][0].double() + exact.gradients[n].double(),
                 plain.gradients[n], exact.gradients[n], noise)
        for n in apart
    ]  # fmt: skip
    repeat = loss(Name.TWICE, again.loss - ours.loss + exact.loss, plain, exact)
    worst = max(found, key=lambda each: each.excess, default=None)
    value = max(worst.excess if worst else 0.0, ratio(repeat.value, repeat.limit))
    most = max((each.relative for each in found), default=0.0)
    detail = f"{len(apart)} of {len(ours.gradients)} gradients not bit-equal, at most {most:.1e} apart (relative L2)"
    return Check(Name.TWICE, value <= 1, value, 1.0, detail, Finding(Cause.NOT_REPEATABLE, detail))


def merged(model: Any) -> list[Check]:
    """Compare each weight that `save_pretrained_merged` would round and write with W + s·B·A, both rounded to the
    nearest; [] for a model without LoRA."""
    base = base_causal_lm(model)
    layers = {name: module for name, module in base.named_modules() if hasattr(module, "lora_A")}
    adapted = {name: module for name, module in layers.items() if module.lora_A or module.lora_embedding_A}
    if not adapted:
        return []
    dtype = merge.checkpoint_dtype(base)
    try:
        stored = {tensor.name: tensor for tensor in merge.merged_tensors(base, dtype)}
    except UnsupportedError as error:
        return [Check(Name.MERGED, True, 0, 0, f"not checked: {error.problem}")]
    forgot: list[str] = []
    off: list[str] = []
    worst = 0.0
    for name, module in adapted.items():
        with torch.no_grad():
            of_experts = hasattr(module, "parameter_name")
            weight = module.get_param().float() if of_experts else dense_weight(module.get_base_layer())
            own = {*module.lora_A, *module.lora_embedding_A}
            right = weight + sum(_delta(module, a, weight) for a in module.active_adapters if a in own)
            for adapter in module.lora_magnitude_vector.keys() & module.active_adapters:  # DoRA's
                norm = right.norm(dim=0 if module.fan_in_fan_out else 1, keepdim=True)
                right *= module.lora_magnitude_vector[adapter].weight.float().view_as(norm) / norm
            key = f"{name.replace('.base_layer', '')}.{module.parameter_name if of_experts else 'weight'}"
            written = stored[key].read().to(right.device)
            found = distance(name, written, right.to(dtype), right)
            worst = max(worst, found.excess)
            if not found.excess <= 1:
                (forgot if torch.equal(written, weight.to(dtype)) else off).append(name)
    detail = f"{counted(len(adapted), 'weight', 'hold')} {'its' if len(adapted) == 1 else 'their'} adapter"
    if forgot or off:
        kinds = ((forgot, "forgot its adapter"), (off, "is not W + s·B·A"))
        detail = "; ".join(f"{what}: {listed(names)}" for names, what in kinds if names)
    return [Check(Name.MERGED, not (forgot or off), worst, 1.0, detail, Finding(Cause.MERGE, detail))]


def _delta(module: Any, adapter: str, weight: Tensor) -> Tensor:
    """Compute s·B·A of an adapter (of all experts for theirs), laid out as the weight is: that of embeddings, and of
    GPT-2's linears, is transposed."""
    if adapter in module.lora_embedding_A:
        a, b = (part[adapter].double() for part in (module.lora_embedding_A, module.lora_embedding_B))
        return module.scaling[adapter] * (b @ a).float().T
    a, b = (part[adapter].weight.double() for part in (module.lora_A, module.lora_B))
    if weight.dim() == 2:
        delta = module.scaling[adapter] * (b @ a).float()
        return delta.T if module.fan_in_fan_out else delta
    count = len(weight)
    a, b = a.view(count, -1, a.shape[1]).float(), b.view(b.shape[0], -1, count).float()
    out = "eio" if module.get_base_layer().is_transposed else "eoi"
    return module.scaling[adapter] * torch.einsum(f"eri,ore->{out}", a, b)


def reloaded(logits: Tensor, differ: list[str], plain: Passes, exact: Passes) -> Check:
    """Compare what plain transformers and PEFT loaded with what was saved."""
    moved = logits.double() - plain.logits.double() + exact.logits.double()
    found = distance("", moved, plain.logits, exact.logits)
    equal = "logits bit-equal" if torch.equal(logits, plain.logits) else f"logits {found.relative:.1e} apart"
    detail = f"trained tensors bit-equal, {equal}"
    check = _of_distance(Name.RELOADED, found, detail)
    if differ:
        detail = f"tensors that differ: {listed(differ)}"
    return replace(check, ok=check.ok and not differ, detail=detail, finding=Finding(Cause.FILES, detail))


def likely_causes(
    checks: list[Check],
    distances: list[Distance],
    from_first: bool,
    shift: int | None,
    position_dependent: tuple[str, ...],
) -> Iterator[Finding]:
    """Tell what is likely wrong from which checks fail together.

    Args:
        from_first: whether logits are off at the first token of a document, which sees nothing but itself.
        shift: by how many tokens labels are shifted, where that explains the loss.
        position_dependent: how the names of tensors begin whose gradients depend on positions.
    """
    failed = {check.name: check.finding for check in checks if not check.ok}

    def told_by(*names: Name) -> list[Finding]:
        return [finding for name in names if (finding := failed.get(name))]

    yield from told_by(Name.DEAD, Name.EXPERTS, Name.VISIBILITY)
    if Name.VISIBILITY in failed:
        pass  # explains logits and gradients, too
    elif failed.keys() & {Name.PRODUCTS, Name.OUTPUTS}:
        yield from told_by(Name.PRODUCTS, Name.OUTPUTS)
    elif Name.CHOICES in failed and Name.LOGITS not in failed:  # else later layers' scores are off for another reason
        yield from told_by(Name.CHOICES)
    elif Name.ALONE in failed:
        yield Finding(Cause.NEIGHBOURS_MATTER)
    elif Name.LOGITS in failed:
        yield Finding(Cause.FORWARD if from_first else Cause.POSITION)
    elif failed.keys() - {Name.COSINE} == {Name.GRADIENTS}:
        off = [tensor.name for tensor in distances if not tensor.excess <= 1]
        position = all(name.startswith(position_dependent) for name in off)
        yield Finding(Cause.POSITION_IN_GRADIENTS) if position else Finding(Cause.BACKWARD, listed(off))
    if Name.LOSS in failed and Name.LOGITS not in failed:
        by_shift = {None: Cause.LOSS, 0: Cause.LABELS_NOT_SHIFTED, 2: Cause.LABELS_SHIFTED_TWICE}
        yield Finding(by_shift.get(shift, Cause.LOSS))
    elif Name.ACCUMULATED_LOSS in failed and Name.LOSS not in failed:
        yield Finding(Cause.ACCUMULATION)
    yield from told_by(Name.TWICE, Name.COSINE)


def rows_off(packed: Tensor, plain: Passes, exact: Passes) -> Tensor:
    """Return bool [R], the rows whose logits are further off than plain's worst row may be."""
    right = exact.logits.double()
    ours, allowed = ((x.double() - right).square().mean(-1).sqrt() for x in (packed, plain.logits))
    return ~(ours <= THREE_WAY.limit(allowed.max().item(), right.abs().max().item()))


def _of_distance(name: Name, found: Distance, detail: str) -> Check:
    by_rms = ratio(found.rms, found.rms_limit) >= ratio(found.maximum, found.maximum_limit)
    value, limit = (found.rms, found.rms_limit) if by_rms else (found.maximum, found.maximum_limit)
    return Check(name, found.excess <= 1, value, limit, detail)
