"""What a check of jobs/preflight.py finds: a row with a verdict and the fix; the rows of all hosts as one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from errors import UserError, without_secrets

PASS, WARN, FAIL = "pass", "warn", "fail"
ORDER = (PASS, WARN, FAIL)  # the worst last


@dataclass(frozen=True)
class Row:
    """One check: `fix` says what to do where the verdict is not "pass"."""

    name: str
    verdict: str
    found: str
    fix: str = ""

    @property
    def severity(self) -> int:
        return ORDER.index(self.verdict)


def attempt(name: str, check: Callable[..., Any], *arguments: Any, fix: str = "") -> tuple[Any, list[Row]]:
    """(what it returns, no rows), or (None, the row that says what the user or the machine has wrong).

    `fix`, where the error names none behind a semicolon.
    """
    try:
        return check(*arguments), []
    except (UserError, OSError) as error:
        found, _, named = without_secrets(" ".join(str(error).split())).partition("; ")
        return None, [Row(name, FAIL, found, named or fix or "as it says")]


def judged(name: str, bad: bool, found: str, fix: str, verdict: str = FAIL) -> Row:
    """`verdict` where it is bad, else a pass, which needs no fix."""
    return Row(name, verdict, found, fix) if bad else Row(name, PASS, found)


def joined(hosts: Sequence[str], found: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of several hosts, a list each: one row a name, of the host where it is worst."""
    names = dict.fromkeys(row.name for rows in found for row in rows)
    return [_worst(name, hosts, found) for name in names]


def _worst(name: str, hosts: Sequence[str], found: Sequence[Sequence[Row]]) -> Row:
    own = [(host, row) for host, rows in zip(hosts, found, strict=True) for row in rows if row.name == name]
    host, worst = max(own, key=lambda each: each[1].severity)
    if len(hosts) == 1:
        return worst
    if worst.verdict == PASS:
        return Row(name, PASS, f"{worst.found} (the first of {len(own)} nodes)")
    others = [each for each, row in own if row.severity == worst.severity and each != host]
    also = f"; so it is on {', '.join(others[:4])}{' ...' if len(others) > 4 else ''}" if others else ""
    return Row(name, worst.verdict, f"{host}: {worst.found}{also}", worst.fix)


def table(rows: Sequence[Row]) -> str:
    """A line a row, and one below it with the fix."""
    width = 2 + max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.verdict:<6}{row.name:<{width}}{row.found}")
        if row.verdict != PASS:
            lines.append(f"{'':<6}{'':<{width}}fix: {row.fix}")
    return "\n".join(lines)
