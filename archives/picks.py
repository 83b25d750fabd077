"""One element of a dimension that analyses do not have, a member or a run: data.select = ["member=0"].

Standard library only: the check of a command line imports this module, and answers in under a second.
"""

from collections.abc import Mapping, Sequence

from errors import ConfigError, refuse

KEY = "data.select"


def parse_picks(texts: Sequence[str]) -> dict[str, str]:
    """["member=0", "run=first"] -> {"member": "0", "run": "first"}. ConfigError for anything else."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, label = (part.strip() for part in text.partition("="))
        if not (name and equals and label):
            refuse(KEY, list(texts), 'name a dimension and one of its labels, for example ["member=0"]')
        if name in found:
            refuse(KEY, list(texts), f"{name!r} stands twice; keep one of them")
        found[name] = label
    return found


def position_of(dim: str, label: str, labels: Sequence[str] | None, size: int) -> int:
    """Where a label lies on a dimension; without labels it is a position from 0 on. ConfigError: nowhere.

    A date may be cut short ("2020-01-01") where that means one label only.
    """
    known = [str(number) for number in range(size)] if labels is None else list(labels)
    same = [i for i, each in enumerate(known) if _same(each, label)]
    begins = [i for i, each in enumerate(known) if "T" in each and each.startswith(label)]
    found = same or (begins if len(begins) == 1 else [])
    if not found:
        shown = ", ".join(known[:5]) + (f" ... {known[-1]}" if len(known) > 5 else "")
        refuse(KEY, [f"{dim}={label}"], f"{dim} has {shown}; take one of them")
    return found[0]


def _same(text: str, wanted: str) -> bool:
    """Equal, or the same number: "0" and "0.0"."""
    try:
        return text == wanted or float(text) == float(wanted)
    except ValueError:
        return False


def check_used(picks: Mapping[str, str], dims: Mapping[str, int], path: str) -> None:
    """Every dimension that is named has to be there. dims: name -> size of those that could be."""
    for name in picks:
        if name not in dims:
            there = ", ".join(f"{dim} ({size})" for dim, size in dims.items()) or "none"
            fix = f"{path!r} has no such dimension to pick from, but {there}; remove it or name one of these"
            raise ConfigError(f"{KEY} = {name!r}: {fix}")
