"""How full packed rows are, against the ceiling that the lengths allow, and how long packing a million documents takes.

python -m benchmarks.packing [--lengths FILE ...] [--seed N]; each FILE is a JSON list of document lengths in tokens.
"""

import argparse
import json
import random
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pronghorn.data.packing import pack, packing_ceiling, packing_efficiency

CAPACITIES = (2048, 4096, 8192)


def efficiency_table(files: list[Path], seed: int) -> Table:
    table = Table("lengths", "row", "documents", "dropped (too long)", "rows", "efficiency", "ceiling", "of ceiling")
    for column in table.columns[1:]:
        column.justify = "right"
    for file in files:
        every: list[int] = json.loads(file.read_text(encoding="utf-8"))
        for capacity in CAPACITIES:
            lengths = [length for length in every if length <= capacity]
            rows = pack(lengths, capacity, seed)
            efficiency, ceiling = packing_efficiency(lengths, rows, capacity), packing_ceiling(lengths, capacity)
            counts = (capacity, len(lengths), len(every) - len(lengths), len(rows))
            shares = (efficiency, ceiling, efficiency / ceiling)
            table.add_row(file.stem, *(f"{count:,}" for count in counts), *(f"{share:.2%}" for share in shares))
    return table


def time_a_million(capacity: int, seed: int) -> tuple[float, float, float]:
    """Packs 1,000,000 log-normal lengths (mean about 180 tokens): seconds, efficiency, ceiling."""
    draw = random.Random(seed)
    lengths = [min(capacity, 1 + round(draw.lognormvariate(4.87, 0.8))) for _ in range(1_000_000)]
    start = time.perf_counter()
    rows = pack(lengths, capacity, seed)
    seconds = time.perf_counter() - start
    return seconds, packing_efficiency(lengths, rows, capacity), packing_ceiling(lengths, capacity)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--seed", type=int, default=3407)
    arguments = parser.parse_args()
    console = Console()
    if arguments.lengths:
        console.print(efficiency_table(arguments.lengths, arguments.seed))
    for capacity in CAPACITIES:
        seconds, efficiency, ceiling = time_a_million(capacity, arguments.seed)
        console.print(
            f"1,000,000 log-normal lengths into rows of {capacity:,}: {seconds:.2f} s, "
            f"efficiency {efficiency:.3%} (ceiling {ceiling:.3%})"
        )


if __name__ == "__main__":
    main()
