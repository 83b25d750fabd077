"""Channels of a model by name: the position of each variable in its input and output.

A state has prognostic, diagnostic and forcing variables, in this order. Each has a channel in the input and
in the output of a model, so that a variable can change its role and keep its weights: the input of
diagnostic variables is 0, and the output of forcing variables is not used. The input of a model consists of
a window of states (newest first), known variables of the next state, static fields, forcings and noise.
"""

from dataclasses import dataclass

from config import Data
from datasets.variables import expand_levels
from errors import refuse


@dataclass(frozen=True)
class Channels:
    """Names of variables have their level: "geopotential:500". `channels.variables` are those of a state."""

    prognostic: tuple[str, ...]  # predicted, and input of the next step
    diagnostic: tuple[str, ...] = ()  # predicted only
    forcing: tuple[str, ...] = ()  # input only
    static: tuple[str, ...] = ()  # constant fields
    computed: tuple[str, ...] = ()  # from date and position (data.forcings)
    noise_dim: int = 0
    history: int = 1  # states of a window, `step_hours` apart
    step_hours: int = 6
    boundary_width: int = 0  # width in cells of the boundary, which is known of the next state
    forcings_of_target: bool = False

    @classmethod
    def of(cls, data: Data, noise_dim: int = 0) -> "Channels":
        """Return the channels of a configuration. Raises ConfigError."""
        roles = data.variables, data.diagnostic_variables, data.forcing_variables
        names = [name for role in roles for name in role]
        try:
            expanded = expand_levels(names, data.levels)
        except ValueError as error:
            refuse("data.variables", names, str(error))
        on_levels = {name.partition(":")[0] for name in expanded if ":" in name}
        if both := [name for name in expanded if name in on_levels]:
            reason = f"{both[0]} is listed with and without a level, and a forecast has one array of it"
            refuse("data.variables", names, f"{reason}; leave one out, or rename one of them in the data")
        prognostic, diagnostic, forcing = (tuple(expand_levels(role, data.levels)) for role in roles)
        return cls(
            prognostic,
            diagnostic,
            forcing,
            static=tuple(data.static_variables),
            computed=tuple(data.forcings),
            noise_dim=noise_dim,
            history=data.history,
            step_hours=data.step_hours,
            boundary_width=data.boundary_width,
            forcings_of_target=data.forcings_of_target,
        )

    @property
    def variables(self) -> list[str]:
        return [*self.prognostic, *self.diagnostic, *self.forcing]

    @property
    def predicted(self) -> list[str]:
        return [*self.prognostic, *self.diagnostic]

    def find(self, role: str) -> slice:
        """Return the place of "predicted", "diagnostic" or "forcing" variables in a state."""
        ends = {"predicted": (0, len(self.predicted)), "forcing": (len(self.predicted), len(self.variables))}
        ends["diagnostic"] = len(self.prognostic), len(self.predicted)
        return slice(*ends[role])

    @property
    def known(self) -> slice:
        """Slice of the variables that are known of the next state: all with a boundary, else forcings."""
        return slice(len(self.variables)) if self.boundary_width else self.find("forcing")

    @property
    def is_known(self) -> bool:
        """True if some values of the next state are known in advance."""
        return bool(self.boundary_width or self.forcing)

    @property
    def of_target(self) -> list[str]:
        """Inputs of the state that a step leads to."""
        boundary = [f"{name} of the boundary" for name in self.predicted if self.boundary_width]
        target = [f"{name} of the target" for name in self.forcing if self.forcings_of_target]
        return [*boundary, *target]

    @property
    def window(self) -> list[str]:
        """Names of a window's channels: "2m_temperature", ..., "2m_temperature 6 h before"."""
        names, hours = self.variables, self.step_hours
        return [*names, *(f"{name} {n * hours} h before" for n in range(1, self.history) for name in names)]

    @property
    def hidden(self) -> list[int]:
        """Channels of a window that are 0 in the input."""
        places = range(len(self.variables))[self.find("diagnostic")]
        return [state * len(self.variables) + place for state in range(self.history) for place in places]

    @property
    def inputs(self) -> list[str]:
        from models.noise import noise_names  # imports torch, which a check of the command line does not

        return [*self.window, *self.of_target, *self.static, *self.computed, *noise_names(self.noise_dim)]
