"""Options of every launcher: how many nodes, what is on each, which network between them."""

import argparse
import re
from collections.abc import Callable

from errors import shown

FABRICS = ("infiniband", "efa")  # as launch/fabric.sh knows them
MOST = 100_000  # nodes, or anything else that is counted here


def number(least: int) -> Callable[[str], int]:
    """A reader of whole numbers, for argparse."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= MOST:
            raise argparse.ArgumentTypeError(f"{shown(text)}: a whole number from {least} on expected")
        return int(text)

    return read


def word(pattern: str, what: str) -> Callable[[str], str]:
    """A reader of words that stand in a script or a manifest as they are."""

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{shown(text)}: {what} expected")
        return text

    return read


setting = word(r"[\w./-]+=[\w.,:@/+%&|*()\[\]-]+", "name=value without spaces")


def add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=number(1), default=1, metavar="N", help="nodes (default: 1)")
    add("--gpus-per-node", type=number(0), default=1, metavar="N", help="0: ranks on processors (default: 1)")
    add("--ranks-per-node", type=number(1), metavar="N", help="default: its GPUs, or 1 where it has none")
    add("--cpus-per-rank", type=number(1), default=8, metavar="N", help="readers of data too (default: 8)")
    add("--fabric", choices=FABRICS, help="the network between nodes (default: NCCL finds out)")
    add("--nccl-debug", action="store_true", help="NCCL says which network and which settings it takes")
    add("--restarts", type=number(0), default=2, metavar="N", help="starts after a crash (default: 2)")
    add("--script", metavar="FILE", help="where it is written (default: here, named as the configuration)")
    add("--submit", action="store_true", help="submit it, too")


def num_ranks(options: argparse.Namespace) -> int:
    """Ranks on a node."""
    return options.ranks_per_node or options.gpus_per_node or 1
