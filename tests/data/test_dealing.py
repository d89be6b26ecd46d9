"""Which rows a step has, and who computes them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from datasets import Dataset
from torch.utils.data import BatchSampler

from pronghorn.data.dealing import LOOK_AHEAD, ByLength, DealtRows, Share, Unsupervised, deal, imbalance, order, steps
from pronghorn.data.packed_rows import PackedRows, lengths_of


def costs_of(rows: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.choice([1.0, 1.5, 4.0]) for _ in range(rows)]


def rows_of_steps(rows: int, processes: int, micro_batch: int, epoch: int = 0, look_ahead: int = 1) -> list[set[int]]:
    """The rows of each step, put together from what all processes are dealt, each row once."""
    costs, micro_batches = costs_of(rows), 12 // (processes * micro_batch)
    dealt = [
        DealtRows(costs, Share(p, processes, micro_batch, micro_batches), 7, look_ahead=look_ahead)
        for p in range(processes)
    ]
    for each in dealt:
        each.set_epoch(epoch)
    own = [list(each) for each in dealt]
    assert {len(batches) for batches in own} == {len(dealt[0])}, "processes would wait for each other for ever"
    found = []
    for begin in range(0, len(dealt[0]), micro_batches):
        batches = [batch for each in own for batch in each[begin : begin + micro_batches]]
        assert all(0 < len(batch) <= micro_batch for batch in batches)
        supervised = [row for batch in batches for row in batch if not isinstance(row, Unsupervised)]
        assert len(supervised) == len(set(supervised))
        found.append(set(supervised))
    return found


@pytest.mark.parametrize("rows", [1, 11, 12, 25, 48])
@pytest.mark.parametrize("look_ahead", [1, 3])
def test_a_step_has_the_same_rows_on_any_number_of_processes(rows: int, look_ahead: int) -> None:
    alone = rows_of_steps(rows, 1, 1, look_ahead=look_ahead)
    assert sorted(itertools.chain(*alone)) == list(range(rows)) and len(alone) == -(-rows // 12)
    for processes, micro_batch in ((1, 3), (2, 1), (2, 3), (3, 2), (4, 3), (12, 1)):
        assert rows_of_steps(rows, processes, micro_batch, look_ahead=look_ahead) == alone


@pytest.mark.parametrize("look_ahead", [1, 3])
def test_whole_steps_are_the_same_where_what_is_left_over_is_dropped(look_ahead: int) -> None:
    """How much that is depends on the number of processes."""
    shares = [Share(0, processes, 1, 12 // processes) for processes in (1, 2, 4)]
    found = [DealtRows(costs_of(47), each, 3, look_ahead=look_ahead, drop_last=True).steps() for each in shares]
    assert [len(steps[-1]) for steps in found] == [11, 10, 8]
    assert found[0][:3] == found[1][:3] == found[2][:3]


def test_an_epoch_s_order_depends_on_seed_and_epoch_alone() -> None:
    assert order(50, 1, 0) == order(50, 1, 0) != order(50, 1, 1) != order(50, 2, 0)
    assert order(5, 1, 0, shuffled=False) == [0, 1, 2, 3, 4]
    assert rows_of_steps(48, 2, 1, epoch=0) != rows_of_steps(48, 2, 1, epoch=1)


def test_one_process_has_rows_in_their_order() -> None:
    dealt = DealtRows(costs_of(9), Share(0, 1, 2, 2), 3)
    assert list(itertools.chain(*dealt)) == order(9, 3, 0) and list(map(len, dealt)) == [2, 2, 2, 2, 1]


def test_the_dearest_rows_go_to_different_processes() -> None:
    assert deal([9.0, 1.0, 9.0, 1.0], 2, 2) == [[0, 1], [2, 3]]
    assert deal([9.0, 1.0, 1.0, 1.0], 2, 2) == [[0, 3], [1, 2]]  # nobody gets more than two
    assert deal([1.0], 3, 1) == [[0], [], []]


def test_dealing_by_cost_never_waits_longer_and_looking_ahead_waits_less() -> None:
    for seed in range(20):
        costs = costs_of(64, seed)
        cut = steps(order(64, seed, 0), costs, 4, 1, seed)
        in_turn, dealt = (imbalance(costs, cut, 2, dealt=by_cost) for by_cost in (False, True))
        ahead = imbalance(costs, steps(order(64, seed, 0), costs, 4, 16, seed), 2, dealt=True)
        assert ahead <= dealt <= in_turn + 1e-12
        assert in_turn > 0.05 and ahead < 0.05
    assert imbalance([1.0, 1.0, 3.0, 3.0], [[0, 2], [1, 3]], 2, dealt=True) == pytest.approx(1 - 8 / 12)
    assert imbalance([1.0, 1.0, 3.0, 3.0], [[0, 1], [2, 3]], 2, dealt=True) == 0


def test_where_rows_cost_alike_nothing_is_regrouped_and_else_on_any_number_of_processes() -> None:
    shares = [Share(0, 1, 1, 4), Share(1, 2, 1, 2), Share(0, 2, 2, 1), Share(3, 4, 1, 1)]
    alike, unlike = [1.0] * 48, costs_of(48)
    assert all(DealtRows(alike, share, 7, look_ahead=None).look_ahead == 1 for share in shares)
    dealt = [DealtRows(unlike, share, 7, look_ahead=None) for share in shares]
    assert all(each.look_ahead == LOOK_AHEAD and each.steps() == dealt[0].steps() for each in dealt)
    assert dealt[-1].waiting()[1] < 0.05 < dealt[-1].waiting(1)[1]
    assert DealtRows(unlike, Share(0, 2, 1, 2), 7, shuffled=False, look_ahead=None).look_ahead == 1, "in its order"
    assert DealtRows(unlike, Share(0, 1, 1, 1), 7, look_ahead=None).look_ahead == 1, "a step of one row waits for none"


def test_looking_ahead_regroups_whole_steps_only() -> None:
    costs = costs_of(26)
    cut = steps(order(26, 1, 0), costs, 4, 3, 1)
    assert sorted(itertools.chain(*cut)) == list(range(26)) and cut[-1] == order(26, 1, 0)[24:]
    window = sorted(order(26, 1, 0)[:12])
    assert sorted(itertools.chain(*cut[:3])) == window, "rows left their window"


def test_what_is_left_out_fills_no_micro_batch_of_every_process() -> None:
    dealt = DealtRows(costs_of(11), Share(0, 2, 2, 2), 1, drop_last=True)
    assert [len(step) for step in dealt.steps()] == [8] and len(dealt) == len(list(dealt)) == 2


def test_rows_cost_what_their_documents_attend_to() -> None:
    documents = [{"input_ids": [1] * n, "labels": [1] * n} for n in (8, 4, 4)]
    rows = PackedRows(documents, 8)
    assert sorted(rows.costs(0.5)) == [8 + 0.5 * 32, 8 + 0.5 * 64]
    alone = PackedRows(documents[1:2], 8)
    assert alone.costs(1.0) == [8 + 16 + 16], "the padding attends to itself"


def test_a_row_without_labels_keeps_its_tokens() -> None:
    rows = PackedRows([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}], 8)
    assert rows[Unsupervised(0)] == {**rows[0], "labels": [-100] * 3}


def batches_of_steps(rows: Iterable[int], share: Share, drop_last: bool) -> list[list[list[list[int]]]]:
    """Return each step's micro-batches, by process, as stock and accelerate cut them from an order."""
    cut: Any = BatchSampler(rows, share.rows, drop_last)  # type: ignore[arg-type]
    if share.processes == 1:
        dealt = [list(cut)]
    else:
        dealt = [list(BatchSamplerShard(cut, share.processes, process)) for process in range(share.processes)]
    assert len({len(each) for each in dealt}) == 1, "processes would wait for each other for ever"
    each = share.micro_batches
    return [[own[begin : begin + each] for own in dealt] for begin in range(0, len(dealt[0]), each)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_steps_by_length_have_stock_s_documents(processes: int, drop_last: bool) -> None:
    for documents, rows, micro_batches in itertools.product((1, 7, 16, 37, 96), (1, 2, 4), (2, 3)):
        share = Share(0, processes, rows, micro_batches)
        lengths = [random.Random(documents).choice([3, 5, 8, 21]) + i % 9 for i in range(documents)]
        epoch = order(documents, 5, 0)
        by_length = ByLength(epoch, lambda lengths=lengths: lengths, share, drop_last)
        assert len(by_length) == len(list(by_length))
        plain, dealt = (batches_of_steps(each, share, drop_last) for each in (epoch, by_length))

        def rows_of(step: Any) -> list[int]:
            return sorted(row for own in step for batch in own for row in batch)

        def padded(step: Any, lengths: Any = lengths) -> list[list[int]]:
            return [[len(batch) * max(lengths[row] for row in batch) for batch in own] for own in step]

        def shape(found: Any) -> list[Any]:
            return [[[len(batch) for batch in own] for own in step] for step in found]

        assert list(map(rows_of, dealt)) == list(map(rows_of, plain)) and shape(dealt) == shape(plain)
        slowest = their_slowest = 0
        for step, before in zip(dealt, plain, strict=True):
            work, their_work = padded(step), padded(before)
            assert all(own == sorted(own, reverse=True) for own in work), "the longest first"
            assert sum(map(sum, work)) <= sum(map(sum, their_work))
            slowest, their_slowest = slowest + max(map(sum, work)), their_slowest + max(map(sum, their_work))
        assert documents < 96 or slowest < their_slowest or share.rows * processes == 1


def test_each_epoch_has_its_own_order_by_length() -> None:
    stock = SeedableRandomSampler(range(40), data_seed=3)
    by_length = ByLength(stock, lambda: [1] * 40, Share(0, 1, 4, 2))  # of equal lengths: the order is stock's own
    epochs = []
    for epoch in (0, 1, 0):
        by_length.set_epoch(epoch)
        epochs.append(list(by_length))
        stock.set_epoch(epoch)
        assert epochs[-1] == list(stock)
    assert epochs[0] == epochs[2] != epochs[1]


def test_lengths_of_a_million_documents_are_read_without_decoding_one() -> None:
    ends = np.arange(0, 3_000_001, 3, dtype=np.int32)
    column = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.zeros(3_000_000, dtype=np.int32)))
    documents = Dataset(pa.table({"input_ids": column}))
    began = time.perf_counter()
    assert lengths_of(documents) == [3] * 1_000_000
    assert time.perf_counter() - began < 1, "a loop over rows takes a minute"
