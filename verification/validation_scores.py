"""What a validation found: for metrics.jsonl, and as a table.

Shapes: L leads, V variables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from verification.ensembles import spread_skill


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
        keys = {name: "rmse" if name == "model" else f"rmse_{name.replace(' ', '_')}" for name in self.rmse}
        tables = {keys[name]: table for name, table in self.rmse.items()} | self.ensemble_scores
        for key, table in tables.items():
            for hours, row in zip(self.lead_hours, table.tolist(), strict=True):
                suffix = "" if hours == self.lead_hours[0] else f"@{hours}h"
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
