"""Several processes that train copies of one model: rows are dealt, and gradients averaged once a step, in one piece.

`DistributedDataParallel` averages buckets while the backward runs, by hooks on each parameter, which layers that are
replayed as one CUDA graph never reach. The gradients of adapters are small: all of them travel at once, after the last
backward of a step, in less time than a layer takes. What is large (full fine-tuning) stays with DDP, which overlaps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, Sampler
from transformers import TrainerCallback

from pronghorn.data.dealing import DealtRows, Share
from pronghorn.data.packed_rows import PackedRows
from pronghorn.device import processes
from pronghorn.errors import DataError, UnsupportedError
from pronghorn.export.folder import full_disk, whole_folder
from pronghorn.kernels.packed import PackedTensor
from pronghorn.memory.step_time import attention_share
from pronghorn.models.auto_plan import dims_of
from pronghorn.models.families import base_causal_lm
from pronghorn.parallel.sharded import IN_BUFFER, whole_trained
from pronghorn.parallel.training import TrainedParts
from pronghorn.text import counted

MOST_BYTES = 2**30
"""Of gradients that travel in one piece: about 5 ms between GPUs of one host."""

LARGE_BYTES = 2**28
"""Of a gradient that travels by itself, without a copy: embeddings beside layers that processes share."""


def averages_at_once(model: nn.Module) -> bool:
    """Tell whether the gradients of a model's trained parameters travel in one piece, once a step, if at all; those
    beside trained layers that processes share always do."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return any(hasattr(p, IN_BUFFER) for p in trained) or sum(p.nbytes for p in trained) <= MOST_BYTES


class CopiesAccelerator(Accelerator):
    """An accelerator that leaves a model unwrapped where `averages_at_once`."""

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepare a model as `Accelerator` does, without DDP where gradients travel in one piece."""
        return super().prepare_model(model, device_placement, evaluation_mode or averages_at_once(model))


@torch.no_grad()
def copy_from_first(model: nn.Module) -> list[nn.Parameter]:
    """Give every process the weights of process 0 that it has whole, and return those that are trained: whoever made
    them may not have seeded.

    Of frozen ones, which nearly always come from a checkpoint, only those travel whose sums differ. Packed ones stay:
    every process loads the same ones.
    """
    trained = whole_trained(model)
    for flat, parts in _flattened(trained):
        dist.broadcast(flat, 0)
        _put_back(flat, parts)
    whole = (p for p in model.parameters() if not (p.requires_grad or p.is_meta or hasattr(p, IN_BUFFER)))
    plain = (p for p in whole if type(p.data) is Tensor and getattr(p, "quant_state", None) is None)
    frozen = [p for p in plain if p.element_size() > 1]
    if not frozen:
        return trained
    device = (trained or frozen)[0].device  # frozen ones may wait in host memory, which NCCL doesn't reach
    sums = torch.stack([p.sum(dtype=torch.float64).to(device) for p in frozen])
    first = sums.clone()
    dist.broadcast(first, 0)
    differ = (sums != first).int()
    dist.all_reduce(differ, op=dist.ReduceOp.MAX)
    for parameter in (p for p, differs in zip(frozen, differ.tolist(), strict=True) if differs):
        values = parameter.to(device).contiguous()
        dist.broadcast(values, 0)
        parameter.copy_(values)
    return trained


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], shared: TrainedParts | None = None) -> None:
    """Average the gradients of all processes, in place, and wait for those of `shared` layers. A parameter that got
    none on a process counts as zero there: an expert that saw no token."""
    if shared is not None:
        shared.finish()
    gradients, averaged = list[Tensor](), () if shared is None else shared.first
    for parameter in parameters:
        if any(parameter is each for each in averaged):
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    for gradient in (each for each in gradients if each.nbytes > LARGE_BYTES):
        dist.all_reduce(gradient)
        gradient.div_(processes())
    for flat, parts in _flattened(each for each in gradients if each.nbytes <= LARGE_BYTES):
        dist.all_reduce(flat)
        _put_back(flat.div_(processes()), parts)


class OwnRandomState(TrainerCallback):
    """Seeds each process by itself, as all have one seed until then: otherwise the rows that they compute at the same
    time would have one mask of dropout. The order of rows is settled by now, and that of a further training is drawn by
    one seed again. A resumed training takes up its own states after this."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if processes() > 1:
            torch.manual_seed(args.seed + dist.get_rank())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if processes() > 1:
            torch.manual_seed(args.seed)


def settle_loss_scale(accelerator: Accelerator, args: Any) -> None:
    """Give float16's training its loss scale on the CPU too, where accelerate has none; and each process its share of
    it. Its losses are as many times larger as there are processes, since gradients are averaged, so the same steps
    overflow then as in one."""
    if args.fp16 and accelerator.scaler is None and args.device.type == "cpu":
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True
    if accelerator.scaler is not None and (state := accelerator.scaler.state_dict()):
        accelerator.scaler.load_state_dict(state | {"scale": state["scale"] / processes()})


def _flattened(tensors: Iterable[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Return one flat copy for each dtype and device, with what it was made of."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [(torch.cat([part.reshape(-1) for part in parts]), parts) for parts in alike.values()]


def _put_back(flat: Tensor, parts: list[Tensor]) -> None:
    pieces = flat.split([part.numel() for part in parts])
    torch._foreach_copy_(parts, [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)])


WIDTH_SHARE = 0.36
"""`attention_share` times the hidden size, of layers with 12 · hidden² weights: attention as wide as the stream, an MLP
four times as wide."""


def attention_against_products(model: Any) -> float:
    """Return what attention takes of one token against its products, by the model's layers, or by their width where
    these aren't known."""
    base = base_causal_lm(model)
    try:
        return attention_share(dims_of(base), full=not hasattr(model, "peft_config"))
    except UnsupportedError:
        return WIDTH_SHARE / base.config.hidden_size


_OPTIONS = (
    *("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context", "in_order"),
)
"""What a loader takes over from the trainer's arguments."""


def data_seed(args: Any) -> int:
    """Return the seed of the packing and of the order of rows."""
    return int(args.seed if args.data_seed is None else args.data_seed)


def dealt_loader(
    rows: PackedRows,
    attention: float,
    look_ahead: int | None,
    args: Any,
    collator: Any,
    accelerator: Accelerator,
    sampler: Sampler,
) -> DataLoader:
    """Make the loader of this process's micro-batches, whose rows are dealt by their costs (`data.dealing`).

    Args:
        attention: what attention takes of one token against its products.
        look_ahead: steps whose rows are regrouped by cost; None: where that saves waiting.
        args: the trainer's.
        sampler: transformers' own; a random one means a random order, which the seed and the epoch decide.
    """
    share = Share(
        args.process_index, args.world_size, args.per_device_train_batch_size, args.gradient_accumulation_steps
    )
    shuffled, drop_last = isinstance(sampler, RandomSampler), args.dataloader_drop_last
    dealt = DealtRows(rows.costs(attention), share, data_seed(args), shuffled, look_ahead, drop_last)
    options = {name: getattr(args, f"dataloader_{name}") for name in _OPTIONS}
    loader = DataLoader(rows, batch_sampler=dealt, collate_fn=collator, **options)
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,  # the rows are this process's already
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )


def nonempty(loader: DataLoader, rows: Any, args: Any) -> DataLoader:
    """Return the loader, if there is a micro-batch: `dataloader_drop_last` may leave out every row.

    Raises:
        DataError: there is none.
    """
    if args.dataloader_drop_last and hasattr(rows, "__len__") and len(loader) == 0:
        each = args.per_device_train_batch_size
        raise DataError(
            f"dataloader_drop_last leaves out all there is, {counted(len(rows), 'row')}: a micro-batch has {each} "
            f"on each of {counted(args.world_size, 'process')}",
            "leave dataloader_drop_last out, or give more rows, fewer processes or a lower per_device_train_batch_size",
        )
    return loader


def step_rows(args: Any) -> int:
    """Return the rows of a step, of all processes."""
    share = 1 if args.accelerator_config.split_batches else int(args.world_size)
    return int(args.per_device_train_batch_size) * int(args.gradient_accumulation_steps) * share


@contextmanager
def folder_of_all(target: Path, main: bool) -> Iterator[Path]:
    """Yield `whole_folder(target)`, which the main process makes, to every process.

    Raises:
        TrainingError: the disk is full, by whichever process noticed.
    """
    with whole_folder(target) if main else full_disk(target) as folder:
        told: list[Any] = [folder]
        broadcast_object_list(told)
        yield told[0]


def leave_packed_to_each_process(model: Any) -> None:
    """Tell DDP to not broadcast packed weights, which can't be written to: every process loads the same ones."""
    packed = [name for name, parameter in model.named_parameters() if isinstance(parameter, PackedTensor)]
    if packed:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, packed)
