"""What Optuna (an extra) proposes next: combinations of values, by the scores of those before.

The study lies in a file of Optuna's own (its journal), in the folder of the sweep: a trial that was proposed
and has no score is taken up first. A trial's number seeds what is drawn for it, so that a sweep that was
stopped proposes what one that was not would have.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna  # type: ignore[reportMissingImports]
from optuna.distributions import (  # type: ignore[reportMissingImports]
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import TPESampler  # type: ignore[reportMissingImports]
from optuna.storages import JournalStorage  # type: ignore[reportMissingImports]
from optuna.storages.journal import JournalFileBackend  # type: ignore[reportMissingImports]
from optuna.trial import FrozenTrial  # type: ignore[reportMissingImports]

from errors import refuse
from training.optimizers.search_space import Varied

JOURNAL = "optuna.journal"


@dataclass(frozen=True)
class Proposal:
    """A trial: its number, and key -> text of each value."""

    number: int
    texts: dict[str, str]
    scored: bool

    def __str__(self) -> str:
        return ", ".join(f"{key} = {text}" for key, text in self.texts.items())


class Study:
    """The trials of a sweep. asked: what has to be the same when it goes on."""

    def __init__(self, folder: Path, varied: list[Varied], seed: int, asked: dict[str, Any]) -> None:
        """ConfigError: the folder's study is another one's."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.varied, self.seed, path = varied, seed, folder / JOURNAL
        storage = JournalStorage(JournalFileBackend(str(path)))
        self.study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True)
        there = self.study.user_attrs.get("asked", asked)
        for key, value in asked.items():
            if there[key] != value:
                reason = f"{path} was begun with {there[key]!r}; name another job.dump_folder, or remove it"
                refuse(f"--{key}", value, reason)
        self.study.set_user_attr("asked", asked)

    def proposals(self, number: int) -> Iterator[Proposal]:
        """So many: those of earlier starts, then new ones, each when the one before has its score."""
        before = self.study.trials[:number]
        yield from (self._proposal(trial, trial.state.is_finished()) for trial in before)
        yield from (self._propose(new) for new in range(len(before), number))

    def _propose(self, number: int) -> Proposal:
        self.study.sampler = TPESampler(seed=(self.seed * 1_000_003 + number) % 2**32)
        space = {each.key: distribution(each) for each in self.varied}
        return self._proposal(self.study.ask(space), False)

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """None: it has none, and is as bad as can be: what lies near it is proposed less often."""
        self.study.tell(proposal.number, math.inf if score is None else score)

    def _proposal(self, trial: optuna.Trial | FrozenTrial, scored: bool) -> Proposal:
        texts = {each.key: each.text(trial.params[each.key]) for each in self.varied}
        return Proposal(trial.number, texts, scored)


def distribution(varied: Varied) -> BaseDistribution:
    if varied.texts:
        return CategoricalDistribution(varied.texts)
    if isinstance(varied.low, int):
        return IntDistribution(varied.low, int(varied.high), log=varied.log)
    return FloatDistribution(varied.low, varied.high, log=varied.log)
