"""Documents that verify is asked about, and what its report must say of a defect."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pronghorn.data.batch import Collator
from pronghorn.diagnose.verify_checks import verify
from pronghorn.diagnose.verify_report import Report
from pronghorn.diagnose.verify_subject import Subject, rows_of
from pronghorn.families.registry import FAMILIES as FAMILY_FACTS
from pronghorn.models.attach import attach
from pronghorn.models.lora import add_lora
from support.tiny import DELTA_FAMILIES, VOCAB, tiny_model

TOKENS = 96


def documents(count: int = 12, seed: int = 0) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        ids = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(12, 40))]
        made.append({"input_ids": ids, "labels": [-100] * 3 + ids[3:]})
    return made


def only_cause(report: Report, words: str) -> None:
    assert not report.ok
    assert len(report.causes) == 1 and words in report.causes[0], (report.causes, report.checks)


def subjects(folder: Callable[[str], Path]) -> Callable[..., Subject]:
    """What makes a subject of a family's tiny model, saved once into such a folder, with LoRA adapters or whole."""
    folders: dict[str, Path] = {}

    def make(
        family: str,
        full: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        experts: Sequence[str] = (),
    ) -> Subject:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        if family not in folders:
            folders[family] = folder(family.partition(" ")[0])
            wide = {"linear_key_head_dim": 16} if family in DELTA_FAMILIES else {}  # the least that Triton multiplies
            tiny_model(family, **wide).save_pretrained(folders[family])

        def load(folder: Path) -> Any:
            stock = FAMILY_FACTS[family.partition(" ")[0]].load_attention
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=stock)
            return model.to(device)

        return Subject(
            name=family,
            build=lambda: (
                load(folders[family]) if full else add_lora(load(folders[family]), r=4, target_parameters=experts)
            ),
            attach=attach,
            collate=Collator(TOKENS, pad_token_id=0),
            reload=lambda folder: load(folder) if full else PeftModel.from_pretrained(load(folders[family]), folder),
            rows=rows_of(documents(), TOKENS),
            row_tokens=TOKENS,
        )

    return make


def planted(subject: Subject, plant: Callable[[Any], object]) -> Report:
    """The verdict with a defect put into the attached model."""

    def attach_and_plant(model: Any) -> None:
        attach(model)
        plant(model)

    return verify(replace(subject, attach=attach_and_plant))
