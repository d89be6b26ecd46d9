"""TRL's trainers and the settings that change what they compute: each with its rows, for small models."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

ROWS = 12
_ASKED = [f"Is {n} even?" + "x" * (n % 4) for n in range(ROWS)]
_GOOD = [" yes" * (1 + n % 3) for n in range(ROWS)]
_BAD = [" no" * (1 + n % 5) for n in range(ROWS)]
_SETS: dict[str, dict[str, list[Any]]] = {
    "pairs": {"prompt": _ASKED, "chosen": _GOOD, "rejected": _BAD},
    "triples": {"prompt": _ASKED, "chosen": _GOOD, "rejected": _BAD, "reference": [" well"] * ROWS},
    "labels": {"prompt": _ASKED, "completion": _GOOD, "label": [bool(n % 2) for n in range(ROWS)]},
    "prompts": {"prompt": _ASKED},
    "hints": {"prompt": _ASKED, "privileged_context": ["It is" + " so" * (n % 3) for n in range(ROWS)]},
    "chats": {
        "messages": [
            [{"role": "user", "content": asked}, {"role": "assistant", "content": good}]
            for asked, good in zip(_ASKED, _GOOD, strict=True)
        ]
    },
}
OVER_PADDING = {
    "ORPO": ("logits/",),
    "CPO": ("logits/",),
    "OnlineDPO": ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward"),
}
"""What a trainer logs of predictions from padding, too."""
TIES = ("rewards/accuracies", "eval_rewards/accuracies")
"""What is of the last bit's making where policy and reference are one, as at the first step."""


@dataclass(frozen=True)
class Case:
    """One trainer with its settings."""

    trainer: str
    rows: str
    settings: dict[str, Any]
    needs: tuple[str, ...] = field(default=())
    """Of `reward`, `async_reward`, `teacher`, `reference` and `evaluation`: what the trainer is given besides."""

    @property
    def classes(self) -> tuple[Any, Any]:
        """The trainer and its configuration."""
        public = importlib.import_module("trl")
        if not hasattr(public, f"{self.trainer}Trainer"):
            public = importlib.import_module(f"trl.experimental.{_PACKAGES.get(self.trainer, self.trainer.lower())}")
        return getattr(public, f"{self.trainer}Trainer"), getattr(public, f"{self.trainer}Config")

    def data(self) -> Dataset:
        """Make its rows."""
        return Dataset.from_dict(_SETS[self.rows])


_PACKAGES = {"OnlineDPO": "online_dpo", "IWOPD": "iw_opd"}
CASES: dict[str, Case] = {}


def _add(trainer: str, rows: str, *needs: str, _called: str = "", **settings: Any) -> None:
    CASES[f"{trainer}-{_called}" if _called else trainer] = Case(trainer, rows, settings, needs)


_EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
_DPO_LOSSES = [
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
_SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 1}

for loss in _DPO_LOSSES:
    _smooth = {"label_smoothing": 0.1} if loss in ("exo_pair", "robust") else {}
    _add("DPO", "pairs", _called=loss, loss_type=[loss], **_smooth)
_add("DPO", "pairs", _called="mpo", loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])
_add("DPO", "pairs", _called="ld", ld_alpha=0.5)
for divergence in ("forward_kl", "js_divergence", "alpha_divergence"):
    _add("DPO", "pairs", _called=divergence, f_divergence_type=divergence)
_add("DPO", "pairs", _called="weighting", use_weighting=True)
_add("DPO", "pairs", _called="precomputed", precompute_ref_log_probs=True)
_add("DPO", "pairs", _called="keep_end", max_length=18, truncation_mode="keep_end")
_add("DPO", "pairs", "reference", _called="reference")
_add("DPO", "pairs", "reference", _called="synced", **_SYNCED)
_add("DPO", "pairs", _called="recomputed", gradient_checkpointing=True)
_add("DPO", "pairs", _called="accumulated", gradient_accumulation_steps=2, per_device_train_batch_size=2)
_add("DPO", "pairs", "evaluation", _called="evaluated", **_EVALUATED)
_add("DPO", "pairs", _called="balanced", router_aux_loss_coef=0.05)
for loss in ("kto", "apo_zero_unpaired"):
    _add("KTO", "labels", _called=loss, loss_type=loss)
_add("KTO", "labels", _called="precomputed", precompute_ref_log_probs=True)
_add("KTO", "labels", _called="weights", desirable_weight=1.5, undesirable_weight=0.5)
_add("KTO", "labels", "reference", _called="synced", **_SYNCED)
_add("KTO", "labels", "evaluation", _called="evaluated", **_EVALUATED)
_add("KTO", "labels", _called="balanced", router_aux_loss_coef=0.05)
_add("ORPO", "pairs", max_length=64)
for loss in ("sigmoid", "hinge", "ipo", "simpo", "alphapo"):
    _add("CPO", "pairs", _called=loss, loss_type=loss, max_length=64, alpha=0.3 if loss == "alphapo" else 0.0)
for loss in ("sigmoid", "hinge", "ipo", "tpo-l"):
    _add("TPO", "triples", _called=loss, loss_type=loss)

_GENERATED: dict[str, Any] = {"num_generations": 4, "max_completion_length": 8}
_GRPO: dict[str, dict[str, Any]] = {
    **{loss: {"loss_type": loss} for loss in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo")},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 3e-4},
    "beta": {"beta": 0.1},
    "biased_kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "synced": {"beta": 0.1, **_SYNCED},
    "iterations": {"num_iterations": 3},
    "steps_per_generation": {"steps_per_generation": 3},
    "accumulated": {"gradient_accumulation_steps": 2},
    "recomputed": {"gradient_checkpointing": True},
    "masked_truncated": {"mask_truncated_completions": True},
    "entropy_mask": {"top_entropy_quantile": 0.3},
    "entropy_bonus": {"entropy_coef": 0.1},
    "adaptive_entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 6.0},
    "delta": {"delta": 1.5, "num_iterations": 2},
    "off_policy_mask": {"off_policy_mask_threshold": 1e-4, "num_iterations": 2},
    "head_in_float32": {"cast_lm_head_to_fp32": True},
    "sampling": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "temperature": 0.8},
    "balanced": {"router_aux_loss_coef": 0.05},
}
for name, settings in _GRPO.items():
    _add("GRPO", "prompts", "reward", _called=name, **_GENERATED, **settings)
_add("GRPO", "prompts", "async_reward", _called="async", **_GENERATED)
_add("GRPO", "prompts", "reward", "evaluation", _called="evaluated", num_generations_eval=2, **_GENERATED, **_EVALUATED)
_add("RLOO", "prompts", "reward", **_GENERATED)
_add("RLOO", "prompts", "reward", _called="no_beta", beta=0.0, **_GENERATED)
_add("RLOO", "prompts", "reward", _called="synced", **_SYNCED, **_GENERATED)
_add("RLOO", "prompts", "reward", _called="balanced", router_aux_loss_coef=0.05, **_GENERATED)
_add("GMPO", "prompts", "reward", num_iterations=2, **_GENERATED)
_A2PO = {"beta2": 1.0, "num_value_samples": 2, "filter_all_incorrect": False, "max_completion_length": 8}
_add("A2PO", "prompts", "reward", learning_rate=1e-3, **_A2PO)  # its gradients are large, and multiply rounding
for loss in ("sigmoid", "ipo"):
    _add("OnlineDPO", "prompts", "reward", _called=loss, loss_type=loss, max_new_tokens=8)
_add("OnlineDPO", "prompts", "reward", _called="recomputed", gradient_checkpointing=True, max_new_tokens=8)
for beta in (0.0, 0.5, 1.0):
    _add("Distillation", "prompts", "teacher", _called=str(beta), beta=beta, max_completion_length=8)
for share in (0.0, 0.5, 1.0):
    _add("GKD", "chats", "teacher", _called=str(share), lmbda=share, max_new_tokens=8, max_length=64)
    _add("GOLD", "chats", "teacher", _called=str(share), lmbda=share, max_completion_length=8, max_length=64)
_add("GKD", "chats", "teacher", _called="seq_kd", seq_kd=True, max_new_tokens=8, max_length=64)
for objective in ("iw_opd", "jsd"):
    _add(
        "IWOPD", "chats", "teacher",
        _called=objective, distillation_objective=objective, max_completion_length=8, max_length=64,
    )  # fmt: skip
_SELF: dict[str, Any] = {"max_completion_length": 8, "distillation_topk": 20}
for teacher in ("base", "ema", "live"):
    _add("SDFT", "hints", _called=teacher, teacher_model_kind=teacher, num_generations=2, **_SELF)
    _add("SDPO", "prompts", "reward", _called=teacher, teacher_model_kind=teacher, num_generations=4, **_SELF)
for mode in ("full_logits", "sampled_token"):
    _add("SDFT", "hints", _called=mode, distillation_mode=mode, distillation_alpha=1.0, num_generations=2, **_SELF)
_add("SDPO", "prompts", "reward", _called="blended", distillation_weight=0.5, num_generations=4, **_SELF)
