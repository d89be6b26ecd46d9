"""What a model that was trained on packed rows generates, in the ways that transformers offers, beside plain
transformers and PEFT with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import DynamicCache, StaticCache

from pronghorn import attach
from pronghorn.memory.plan import Plan
from pronghorn.models.attach import attached
from support.fused import with_adapters
from support.generic import generic_model
from support.tiny import FAMILIES, MOE_FAMILIES, VOCAB, packed_row, tiny_model

GENERIC = ("gpt2", "gemma2", "starcoder2", "lfm2", "llama4_text")
MODELS = [(family, layers) for family in (*FAMILIES, *MOE_FAMILIES) for layers in ("stock", "fused")]
MODELS += [(family, "auto") for family in GENERIC]
IDS = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(5))
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0
LONG = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(6))
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
OPTIONS |= {"return_dict_in_generate": True, "output_logits": True}


def plain_model(family: str) -> Any:
    """Make a model with adapters that is not attached."""
    return with_adapters(generic_model(family) if family in GENERIC else tiny_model(family), r=4)


def attached_model(family: str, layers: Any, plan: Plan | None = None) -> Any:
    """Make the same one attached before it has adapters, as `from_pretrained` and `get_peft_model` do."""
    model = generic_model(family) if family in GENERIC else tiny_model(family)
    attach(model, plan, layers=layers)
    model = with_adapters(model, r=4)
    attach(model, plan, layers=layers)
    return model


def step(model: Any, optimizer: Any, seed: int) -> float:
    """Train one packed row, and return its loss."""
    loss = model(**packed_row([5, 17, 1, 9], 32, seed=seed)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def optimizer_of(model: Any) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def generated(model: Any, ids: Tensor = IDS, mask: Tensor | None = MASK, **options: Any) -> list[Tensor]:
    """Return sequences and logits; ids without a mask of their own are without padding."""
    mask = mask if ids is IDS else None
    out = model.generate(input_ids=ids, attention_mask=mask, **OPTIONS | options)
    return [out.sequences, *out.logits, *(scores for step in out.hidden_states or () for scores in step)]


def turns(kind: Any) -> Callable[[Any], list[Tensor]]:
    """Talk over one cache: each turn adds to what the one before left in it."""

    def talk(model: Any) -> list[Tensor]:
        config, ids = model.get_base_model().config, LONG[:, :9]
        cache, seen = kind(config=config, **({"max_cache_len": 32} if kind is StaticCache else {})), []
        for adapter in ("default", "second"):
            model.set_adapter(adapter)
            seen += generated(model, ids, past_key_values=cache)
            ids = torch.cat([seen[-1 - OPTIONS["max_new_tokens"]], LONG[:, 20:24]], 1)
        model.set_adapter("default")
        return seen

    return talk


def embedded(model: Any) -> list[Tensor]:
    embeds = model.get_input_embeddings()(IDS)
    return list(model.generate(inputs_embeds=embeds, attention_mask=MASK, **OPTIONS).logits)


def by_names(model: Any) -> list[Tensor]:
    names = {"adapter_names": ["second", "__base__"]}
    whole = model(input_ids=IDS, attention_mask=MASK, use_cache=False, **names).logits[MASK.bool()]
    return [whole, *generated(model, **names)]


def without_adapter(model: Any) -> list[Tensor]:
    with model.disable_adapter():
        off = [*generated(model), model(IDS, use_cache=False).logits]
    return [*off, model(IDS, use_cache=False).logits]


def merged(model: Any) -> list[Tensor]:
    model.merge_adapter()
    found = [*generated(model), model(IDS, use_cache=False).logits]
    model.unmerge_adapter()
    return [*found, model(IDS, use_cache=False).logits]


def drafted(model: Any) -> list[Tensor]:
    draft = tiny_model("llama", seed=9).eval()
    attach(draft, layers="fused")
    return generated(model, LONG[:, :9], assistant_model=draft)


def in_parts(model: Any) -> list[Tensor]:
    """Continue from a cache with labels."""
    cache = model(IDS[:, :6], use_cache=True).past_key_values
    rest = model(IDS[:, 6:], past_key_values=cache, labels=IDS[:, 6:])
    return [rest.logits, rest.loss]


def branches(model: Any) -> list[Tensor]:
    """Continue from a cache by two tokens that don't see each other, under a mask of one's own."""
    cache = model(IDS[:, :6], use_cache=True).past_key_values
    mask = torch.zeros(2, 1, 2, 8)
    mask[..., 0, 7] = mask[..., 1, 6] = torch.finfo(torch.float32).min
    given = {"attention_mask": mask, "position_ids": torch.tensor([[6, 6]])}
    return [model(IDS[:, 6:8], past_key_values=cache, **given).logits]


def with_masks(model: Any) -> list[Tensor]:
    """Give masks and positions of one's own to forwards without a cache."""
    bands = torch.full((11, 11), torch.finfo(torch.float32).min).triu(1)
    bands[6:, :3] = torch.finfo(torch.float32).min
    given: list[dict[str, Any]] = [{"attention_mask": bands[None, None]}, {"position_ids": torch.arange(11)[None] + 3}]
    given += [{"logits_to_keep": torch.tensor([1, 4])}]
    outputs = [
        model(IDS, labels=IDS if "logits_to_keep" not in each else None, use_cache=False, **each) for each in given
    ]
    padded = [model(IDS, attention_mask=MASK.to(kind)).logits[MASK.bool()] for kind in (torch.bool, torch.float32)]
    return [*(out.logits for out in outputs), *(out.loss for out in outputs[:2]), *padded]


def sampled(model: Any) -> list[Tensor]:
    torch.manual_seed(1)
    return generated(model, do_sample=True, top_p=0.9, num_return_sequences=2)


USES: dict[str, Callable[[Any], list[Tensor]]] = {
    "greedy": generated,
    "sampled": sampled,
    "beams": lambda model: generated(model, num_beams=3, num_return_sequences=2),
    "processors": lambda model: generated(
        model, repetition_penalty=1.3, suppress_tokens=[7], output_hidden_states=True
    ),
    "no cache": lambda model: generated(model, use_cache=False),
    "static cache": lambda model: generated(model, cache_implementation="static"),
    "chunks": lambda model: generated(model, LONG, prefill_chunk_size=7),
    "one token": lambda model: generated(model, LONG[:, :1]),
    "early end": lambda model: generated(model, eos_token_id=list(range(3, 50)), max_new_tokens=8),
    "turns": turns(DynamicCache),
    "turns in a static cache": turns(StaticCache),
    "embeddings": embedded,
    "adapter off": without_adapter,
    "merged": merged,
    "in parts": in_parts,
    "branches": branches,
    "masks": with_masks,
    "prompt lookup": lambda model: generated(model, LONG[:, :6].repeat(1, 3), prompt_lookup_num_tokens=3),
    "draft": drafted,
    "adapters by name": by_names,  # last: PEFT's refusal leaves its hooks behind
}


def outcome(use: Callable[[Any], list[Tensor]], model: Any) -> list[Tensor] | type[Exception]:
    """Return what a use gives, or how transformers or PEFT refuses it: a draft for layers that sum tokens up, adapters
    by name for experts, one mask for layers with a window and without, a static cache of Llama 4 under 5.17."""
    try:
        return use(model)
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("family", "layers"), MODELS)
def test_what_is_generated_is_plain_transformers(family: str, layers: str) -> None:
    plain, model = plain_model(family), attached_model(family, layers)
    optimizer = optimizer_of(model)
    for seed in range(2):
        step(model, optimizer, seed)
    plain.load_state_dict(model.state_dict())
    linears = {name.rpartition(".")[2] for name, module in plain.named_modules() if hasattr(module, "lora_A")}
    for each in (plain, model):
        torch.manual_seed(0)
        each.add_adapter("second", LoraConfig(r=2, target_modules=sorted(linears - {""}), init_lora_weights=False))
        each.eval()
    with torch.no_grad():
        for name, use in USES.items():
            expected, found = outcome(use, plain), outcome(use, model)
            if isinstance(expected, type) or isinstance(found, type):
                assert found is expected, name
                continue
            assert len(found) == len(expected), name
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def between_steps(model: Any, way: int) -> None:
    """Use the model otherwise for a while, and leave it as it was."""
    if way == 0:  # before anything is built for training
        with torch.inference_mode():
            generated(model.eval(), cache_implementation="static")
            model(IDS, attention_mask=MASK, labels=IDS, use_cache=False)
    elif way == 1:  # in training mode, where layers recompute
        generated(model)
    elif way == 2:
        with model.disable_adapter(), torch.no_grad():
            generated(model)
            model(IDS, use_cache=False)
    else:
        handle = attached(model)
        assert handle is not None
        handle.detach()
        generated(model)
        attach(model, handle.plan, layers=handle.options.layers)
    model.train()


@pytest.mark.parametrize("plan", [Plan.keep(), Plan.recompute()], ids=["keep", "recompute"])
@pytest.mark.parametrize("layers", ["stock", "fused"])
def test_training_goes_on_as_if_nothing_had_been_generated(layers: str, plan: Plan) -> None:
    losses = []
    for generates in (False, True):
        model = attached_model("qwen3", layers, plan)
        optimizer, found = optimizer_of(model), []
        for seed in range(4):
            if generates:
                between_steps(model, seed)
            found.append(step(model, optimizer, seed))
        losses.append(found)
    assert losses[0] == losses[1]
