"""How full packed rows are, against the ceiling that the lengths allow, and how long packing a million documents takes.

    python -m benchmarks.packing [--lengths FILE ...] [--seed N]

Each FILE is a JSON list of document lengths in tokens.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.program import parser_of, run, show
from pronghorn.data.packing import pack, packing_ceiling, packing_efficiency

CAPACITIES = (2048, 4096, 8192)


def efficiencies(file: Path, seed: int) -> list[dict[str, Any]]:
    """Pack a file's lengths into rows of each capacity."""
    every, rows = json.loads(file.read_text(encoding="utf-8")), []
    for capacity in CAPACITIES:
        lengths = [length for length in every if length <= capacity]
        packed = pack(lengths, capacity, seed)
        efficiency, ceiling = packing_efficiency(lengths, packed, capacity), packing_ceiling(lengths, capacity)
        counts = {
            "row": capacity,
            "documents": len(lengths),
            "too long": len(every) - len(lengths),
            "rows": len(packed),
        }
        shares = {"efficiency": efficiency, "ceiling": ceiling, "of ceiling": efficiency / ceiling}
        rows.append({"lengths": file.stem, **counts, **{name: f"{share:.2%}" for name, share in shares.items()}})
    return rows


def time_a_million(capacity: int, seed: int) -> tuple[float, float, float]:
    """Pack 1,000,000 log-normal lengths (mean about 180 tokens); return seconds, efficiency, ceiling."""
    draw = random.Random(seed)
    lengths = [min(capacity, 1 + round(draw.lognormvariate(4.87, 0.8))) for _ in range(1_000_000)]
    start = time.perf_counter()
    rows = pack(lengths, capacity, seed)
    seconds = time.perf_counter() - start
    return seconds, packing_efficiency(lengths, rows, capacity), packing_ceiling(lengths, capacity)


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__, measures=False)
    parser.add_argument("--lengths", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--seed", type=int, default=3407)
    return parser


def main(given: argparse.Namespace) -> None:
    """Print how full rows of the files' lengths are, and how long a million takes."""
    if given.lengths:
        show([row for file in given.lengths for row in efficiencies(file, given.seed)])
    for capacity in CAPACITIES:
        seconds, efficiency, ceiling = time_a_million(capacity, given.seed)
        print(
            f"1,000,000 log-normal lengths into rows of {capacity:,}: {seconds:.2f} s, "
            f"efficiency {efficiency:.3%} (ceiling {ceiling:.3%})"
        )


if __name__ == "__main__":
    run(arguments, main)
