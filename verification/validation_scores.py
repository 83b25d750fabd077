"""Results of a validation, for metrics.jsonl and as a table; of an ensemble also CRPS and spread.

Shapes: B dates, M members, L leads, V variables, H latitudes, W longitudes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from verification.scores import fair_crps

ENSEMBLE = ("crps", "variance")


@dataclass
class Scores:
    """RMSE of each forecast, of an ensemble's mean, (L, V) in physical units, and the loss of the one that is
    trained. Of an ensemble also "crps" and "variance" of its members.
    """

    variables: Sequence[str]
    lead_hours: Sequence[int]
    num_dates: Sequence[int]  # with a truth, a lead
    units: Sequence[str]
    rmse: dict[str, Tensor]
    loss: float
    ensemble: dict[str, Tensor] = field(default_factory=dict)
    members: int = 1

    @property
    def ensemble_scores(self) -> dict[str, Tensor]:
        """ "crps", in physical units, and "spread_skill", (L, V) each; nothing where there is no ensemble."""
        if not self.ensemble:
            return {}
        ratio = spread_skill(self.ensemble["variance"], self.rmse["model"], self.members)
        return {"crps": self.ensemble["crps"], "spread_skill": ratio}

    def record(self, step: int) -> dict[str, float]:
        """The validation object of metrics.jsonl: the first lead under plain names, others with @<hours>h."""
        record: dict[str, float] = {"step": step, "val/loss": self.loss}
        suffixes = ["", *(f"@{hours}h" for hours in self.lead_hours[1:])]
        record |= {f"val/dates{suffix}": n for suffix, n in zip(suffixes, self.num_dates, strict=True)}
        keys = {name: "rmse" if name == "model" else f"rmse_{name.replace(' ', '_')}" for name in self.rmse}
        tables = {keys[name]: table for name, table in self.rmse.items()} | self.ensemble_scores
        for key, table in tables.items():
            for suffix, row in zip(suffixes, table.tolist(), strict=True):
                record |= {
                    f"val/{key}/{v}{suffix}": value for v, value in zip(self.variables, row, strict=True)
                }
        return record

    def table(self) -> str:
        """RMSE a variable and lead, the best of each row marked with a star."""
        names = list(self.rmse)
        width = max(len(v) for v in self.variables) + 2
        head = f"{'RMSE':<{width}}{'lead':>6}{'dates':>7}"
        of_members = {"CRPS": "crps", "spread/skill": "spread_skill"} if self.ensemble else {}
        head += "".join(f"{name:>20}" for name in [*names, *of_members]) + "   units"
        lines = [f"validation over {dates_of_leads(self.num_dates, self.lead_hours)}", head, "-" * len(head)]
        for v, variable in enumerate(self.variables):
            for lead, hours in enumerate(self.lead_hours):
                values = [float(self.rmse[name][lead, v]) for name in names]
                cells = [f"{x:>19.4g}{'*' if x == min(values) else ' '}" for x in values]
                cells += [f"{float(self.ensemble_scores[of][lead, v]):>19.4g} " for of in of_members.values()]
                row = f"{variable:<{width}}{hours:>4} h{self.num_dates[lead]:>7}"
                lines.append(f"{row}{''.join(cells)}   {self.units[v]}".rstrip())
        return "\n".join(lines)


def dates_of_leads(num_dates: Sequence[int], lead_hours: Sequence[int]) -> str:
    """ "47 initial dates", or "47 initial dates at 6 h, 7 at 240 h" where not every lead has all of them."""
    first, last, fewest, most = num_dates[0], num_dates[-1], min(num_dates), max(num_dates)
    if fewest == most:
        return f"{first} initial dates"
    between = f", {fewest} to {most} in between" if {fewest, most} != {first, last} else ""
    return f"{first} initial dates at {lead_hours[0]} h, {last} at {lead_hours[-1]} h{between}"


# -- of an ensemble


def ensemble_errors(name: str, members: Tensor, truth: Tensor, area: Tensor) -> Tensor:
    """(B, V) float64: the area-weighted mean, over the cells that have a truth, of the fair CRPS or of the
    unbiased variance of members (B, M, V, H, W) and a truth (B, V, H, W).

    NaN where a field has no cell with a truth, and where a member is not finite though the truth is.
    """
    rows = area.double()[:, None]
    fields = [
        _mean(name, members[date, :, variable], truth[date, variable], rows)
        for date, variable in np.ndindex(*truth.shape[:2])
    ]
    return torch.stack(fields).view(truth.shape[:2])


def _mean(name: str, members: Tensor, truth: Tensor, rows: Tensor) -> Tensor:
    """(M, H, W), (H, W) and weights (H, 1) -> (). One field at a time, as errors of the mean are."""
    valid = torch.isfinite(truth)
    of_cells = fair_crps(members, truth) if name == "crps" else members.double().var(dim=0, correction=1)
    weights = valid * rows
    return (weights * torch.where(valid, of_cells, 0.0)).sum() / weights.sum()


def spread_skill(variance: Tensor, rmse: Tensor, num_members: int) -> Tensor:
    """Spread over skill: 1 where the truth might be one of the members, less where they are too sure.

    variance: the mean over dates and cells of the members' unbiased variance; rmse: of their mean. That of M
    members errs by sqrt((M + 1) / M) more than that of infinitely many (Fortin et al. 2014).
    """
    return ((num_members + 1) / num_members * variance).sqrt() / rmse
