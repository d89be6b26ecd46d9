"""What a profile's costs can be brought down by, the largest first."""

from __future__ import annotations

from pronghorn.diagnose.profile_causes import Cause
from pronghorn.diagnose.profile_record import Advice, Profile
from pronghorn.models.attach import PathTaken

LEAST = 0.02
"""Costs below this share of a step are not worth a change."""
_LARGER = "give a step more work: a larger model.max_seq_length or packing.rows_per_step"
_CHANGES = {
    Cause.DATA: ("the step waits for data", "make rows cheaper to collate: the timeline shows when the step waits"),
    Cause.TO_DEVICE: ("copies to the device are not hidden", "copy from pinned memory, and earlier"),
    Cause.TO_HOST: ("copies to the host are not hidden", "read fewer values back (a larger train.logging_steps)"),
    Cause.COMMUNICATION: ("communication is not hidden", "a larger train.gradient_accumulation_steps"),
    Cause.LOGGING: ("the step waits for logging", "a larger train.logging_steps"),
}


def unfused(paths: list[PathTaken]) -> str | None:
    """Why decoder layers aren't fused, by a handle's report; None where they are, but for experts."""
    layers = next(path for path in paths if path.part == "decoder layers")
    return None if "fused" in layers.path else layers.why


def advise(profile: Profile, unfused: str | None) -> list[Advice]:
    """Args: unfused: why decoder layers aren't fused; None where they are."""
    # the profiler slows the host: of the device's idle time only what can be there without it is worth a change
    kept = min(profile.idle_ms / max(profile.idle_under_profiler_ms, 1e-9), 1.0) if profile.launches else 1.0
    shares = {Cause.DATA: kept, Cause.LOGGING: kept}
    found = [Advice(shares.get(cause, 1.0) * profile.ms(cause), *change) for cause, change in _CHANGES.items()]
    found += _on_device(profile, unfused, kept) if profile.launches else _on_processor(profile)
    if profile.ms(Cause.OPTIMISER) > 0.1 * profile.step_ms:
        change = "twice the train.gradient_accumulation_steps halves it"
        found.append(Advice(profile.ms(Cause.OPTIMISER) / 2, "the optimiser takes long for so short a step", change))
    return sorted((each for each in found if each.ms > LEAST * profile.step_ms), key=lambda each: -each.ms)


def _on_device(profile: Profile, unfused: str | None, kept: float) -> list[Advice]:
    late, after_sync = profile.ms(Cause.IDLE), profile.ms(Cause.AFTER_SYNC)
    sites = ", ".join(sync.site for sync in profile.syncs[:3]) or "none was seen"
    change = f"take synchronisations away, or do them less often (train.logging_steps): {sites}"
    found = [
        Advice(kept * after_sync, "the device runs dry while the host waits for it", change),
        _recomputed(profile, profile.recomputed_ms),
    ]
    if kept * late > 0.1 * profile.plain_ms:
        change = f"packing.graph: auto launches the layers at once where it can; {_LARGER}"
        found.append(Advice(kept * late, "the host can't launch as fast as the device computes", change))
    if unfused is not None:
        parts = (Cause.NORM, Cause.ELEMENTWISE, Cause.ON_DEVICE, Cause.LORA)
        cost = sum(map(profile.ms, parts)) / 2  # a rough figure: no share of it is the same for all models
        found.append(Advice(cost, "decoder layers are not fused", f"take the reason away: {unfused}"))
    return found


def _on_processor(profile: Profile) -> list[Advice]:
    share = min(profile.plain_ms / profile.step_ms, 1)  # here the profiler slows everything
    return [
        _recomputed(profile, share * profile.recomputed_ms),
        Advice(share * profile.ms(Cause.HOST), "Python and autograd between operations", _LARGER),
    ]


def _recomputed(profile: Profile, ms: float) -> Advice:
    cost = "layers are computed a second time in the backward pass"
    if profile.peak_memory_bytes is not None and profile.memory_bytes is not None:
        cost += f" ({profile.peak_memory_bytes / 2**30:.1f} of {profile.memory_bytes / 2**30:.1f} GiB are used)"
    return Advice(ms, cost, "memory.gradient_checkpointing: false, if the activations fit")
