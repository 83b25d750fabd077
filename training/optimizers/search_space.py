"""What a sweep compares: lists and ranges of values, in all combinations or in some that are drawn."""

import itertools
import json
import math
import random
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from command_line import parse_command_line
from config import SECTIONS
from errors import refuse

RANGE = re.compile(r"([^:,\[\]]+):([^:,\[\]]+?)(:log)?")
MOST = 10_000  # combinations
DRAWS = 1000  # for each combination that is wanted, until enough of them differ
LONGEST_NAME = 160  # characters of a folder's name; file systems take 255


@dataclass(frozen=True)
class Varied:
    """One key with its values as a command line has them, or the range that they are drawn from."""

    key: str
    texts: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def draw(self, number: float) -> str:
        """number: at least 0 and below 1. Of a range three digits, so that a folder's name can be read."""
        if self.texts:
            return self.texts[int(number * len(self.texts))]
        low, high = self.low, self.high
        if isinstance(low, int) and not self.log:
            return str(low + int(number * (high - low + 1)))
        return self.text(low * (high / low) ** number if self.log else low + (high - low) * number)

    def text(self, value: Any) -> str:
        """Of a text, itself."""
        if self.texts:
            return value
        value = round(value) if isinstance(self.low, int) else float(f"{value:.3g}")
        return repr(min(max(value, self.low), self.high))


def value_of(key: str, text: str) -> Any:
    """As the configuration has it. ConfigError: no such key, or no such value of it."""
    section, _, name = key.partition(".")
    return parse_command_line([f"--{key}={text}"], SECTIONS)[section][name]


def parse_varied(text: str) -> Varied:
    """ "optimizer.lr=1e-3,2e-3" or "optimizer.lr=1e-4:1e-2:log". Raises ConfigError."""
    key, has_values, values = text.partition("=")
    if not has_values:
        refuse("--vary", text, "a key and its values expected, for example optimizer.lr=1e-3,2e-3")
    if found := _parse_range(key, values):
        return found
    texts = split_values(values)
    known: list[Any] = []
    for each in texts:
        value = value_of(key, each)
        if value in known:
            refuse("--vary", text, f"{each} is listed twice; name it once")
        known.append(value)
    return Varied(key, tuple(texts))


def _parse_range(key: str, text: str) -> Varied | None:
    """None where it is none: texts may have colons."""
    if not (match := RANGE.fullmatch(text)):
        return None
    low, high = value_of(key, match[1]), value_of(key, match[2])
    if not isinstance(low, int | float):
        return None
    log = bool(match[3])
    if not low < high < math.inf or (log and low <= 0):
        lowest = "above 0 and " if log else ""
        refuse("--vary", f"{key}={text}", f"a lowest value {lowest}below the highest expected")
    return Varied(key, (), low, high, log)


def split_values(text: str) -> list[str]:
    """At commas that stand in no list."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def combinations(varied: list[Varied], trials: int, seed: int) -> list[dict[str, str]]:
    """Key -> text of each: all there are, or so many `trials` drawn from a seed. More trials begin with those
    of fewer. Raises ConfigError.
    """
    ranges = [each.key for each in varied if not each.texts]
    if trials:
        return _drawn(varied, trials, seed)
    if ranges:
        refuse("--vary", ranges[0], "values of a range are drawn: say how many with --trials")
    if (number := math.prod(len(each.texts) for each in varied)) > MOST:
        refuse("--vary", number, f"combinations; at most {MOST}; draw some of them with --trials")
    keys = [each.key for each in varied]
    grid = itertools.product(*(each.texts for each in varied))
    return [dict(zip(keys, texts, strict=True)) for texts in grid]


def _drawn(varied: list[Varied], trials: int, seed: int) -> list[dict[str, str]]:
    if not 0 < trials <= MOST:
        refuse("--trials", trials, f"at least 1 and at most {MOST} expected")
    numbers = random.Random(seed)
    found: dict[tuple[str, ...], None] = {}  # in the order of drawing
    for _ in range(DRAWS * trials):
        found[tuple(each.draw(numbers.random()) for each in varied)] = None
        if len(found) == trials:
            return [dict(zip((each.key for each in varied), texts, strict=True)) for texts in found]
    refuse("--trials", trials, f"only {len(found)} combinations differ; ask for so many, or vary more")


def shown_value(value: Any) -> str:
    """As it stands in a table and in a folder's name: [4, 4] is 4-4."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, tuple):
        text = "-".join(shown_value(each) for each in value)
    return re.sub(r"[^\w.+-]+", "-", text)


def name_of(settings: dict[str, Any], seed: int) -> str:
    """Of a run's folder: "optimizer.lr=0.001,model.dim=16,seed=0"."""
    words = [f"{key}={shown_value(value)}" for key, value in settings.items()]
    name = ",".join([*words, f"seed={seed}"])
    if len(name) <= LONGEST_NAME:
        return name
    digest = sha256(json.dumps(settings).encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 30]}-{digest},seed={seed}"
