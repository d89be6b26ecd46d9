"""Chat templates that would make gigabytes, what each ends in, and the most memory that it took until then.

tests/data/test_sandbox.py runs this file.

    python tests/support/huge_templates.py
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path

DOUBLING = "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for a in range(99) %}{% set ns.x = DOUBLE %}{% endfor %}"
HUGE = {
    "written piece by piece": "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "multiplied": "{{ 'a' * 10 ** 10 }}",
    "multiplied as a list": "{{ [1] * 10 ** 10 }}",
    "multiplied from the left": "{{ 10 ** 10 * 'a' }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "joined by ~": DOUBLING.replace("DOUBLE", "ns.x ~ ns.x"),
    "added": DOUBLING.replace("DOUBLE", "ns.x + ns.x"),
    "squared": DOUBLING.replace("'aaaaaaaaaaaaaaaa'", "9").replace("DOUBLE", "ns.x * ns.x"),
    "replaced": DOUBLING.replace("DOUBLE", "ns.x.replace('a', ns.x)"),
    "replaced by a filter": DOUBLING.replace("DOUBLE", "ns.x | replace('a', ns.x)"),
    "joined": DOUBLING.replace("DOUBLE", "ns.x.join(ns.x)"),
    "joined by a filter": DOUBLING.replace("DOUBLE", "ns.x | join(ns.x)"),
    "joined from an iterator": "{{ range(99999) | map('string') | join('a' * 10000000) }}",
    "padded": "{{ 'a'.ljust(10 ** 10) }}",
    "padded by a filter": "{{ 'a' | center(10 ** 10) }}",
    "padded many times": "{{ range(99999) | map('center', 99999) | list }}",
    "filled": "{{ [1] | batch(10 ** 10, 0) | list }}",
    "indented": "{{ ('\n' * 10000000) | indent(99999) }}",
    "expanded": "{{ ('\t' * 10000000).expandtabs(99999) }}",
    "formatted": "{{ '%9999999999d' % 1 }}",
    "formatted by a width": "{{ '%*d' % (9999999999, 1) }}",
    "formatted by a filter": "{{ '%9999999999d' | format(1) }}",
    "formatted by a method": "{{ '{:9999999999}'.format(1) }}",
    "formatted by a method's width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "as bytes": "{{ 1 .to_bytes(10 ** 10, 'big') }}",
    "kept in a list": "{% set ns = namespace(x=[]) %}{% for a in range(9999) %}"
    "{% set ns.x = ns.x + ['a' * 60000000 ~ a] %}{% endfor %}",
}


def main() -> None:
    from pronghorn.data import sandbox
    from pronghorn.errors import ConfigError
    from support.chats import CHATML, byte_level, chat, written

    sandbox.MOST_MADE, found = 2**27, {}
    for name, template in HUGE.items():
        tokenizer, error = byte_level(template + CHATML), "none"
        tracemalloc.start()
        try:
            written(chat("a", "b"), tokenizer)
        except ConfigError as refused:
            error = str(refused)
        found[name] = error, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
