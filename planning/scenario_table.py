"""One table a scenario: what, what its source says, what is computed, and why they differ."""

import textwrap
from dataclasses import dataclass

WIDTHS = (41, 15, 17, 34)


@dataclass(frozen=True)
class Row:
    what: str
    source: str
    computed: str
    remark: str = ""


def table(title: str, rows: list[Row]) -> str:
    lines = [line(title, "source", "computed", "remark"), "-" * (sum(WIDTHS) + 3)]
    for row in rows:
        first, *more = textwrap.wrap(row.remark, WIDTHS[3]) or [""]
        lines.append(line(row.what, row.source, row.computed, first))
        lines += [line("", "", "", rest) for rest in more]
    return "\n".join(lines)


def line(what: str, source: str, computed: str, remark: str) -> str:
    w = WIDTHS
    return f"{what:<{w[0]}} {source:>{w[1]}} {computed:>{w[2]}} {remark:<{w[3]}}".rstrip()


def gb(value: float) -> str:
    """Bytes in GB, of 10^9, as the mission counts."""
    return f"{value / 1e9:,.1f} GB" if value < 1e11 else f"{value / 1e9:,.0f} GB"


def billions(value: float) -> str:
    return f"{value / 1e9:.3g} B"


def percent(share: float) -> str:
    return f"{share:.0%}"
