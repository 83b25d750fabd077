"""A model that Rossby has exported, as a prognostic model of NVIDIA Earth2Studio (0.19).

    model = RossbyModel.from_pretrained("outputs/winds")  # forecast.py --export; or hf://owner/name
    earth2studio.run.deterministic(["2020-01-07"], 12, model, data, io)

Copy this file next to your script: it needs Earth2Studio, not Rossby.

Shapes: B batch (members of an ensemble), T initial times, h states of a window, V variables, H latitudes,
W longitudes.
"""

# pyright: reportMissingImports=false
import json
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import torch
from earth2studio.lexicon import WB2Lexicon
from earth2studio.models.auto import Package
from earth2studio.models.batch import batch_coords, batch_func
from earth2studio.utils import handshake_coords, handshake_dim
from torch import Tensor
from torch.export.passes import move_to_device_pass

Coords = OrderedDict[str, np.ndarray]
NAMES = {name.removesuffix("::").replace("::", ":"): short for short, name in WB2Lexicon.VOCAB.items()}


class RossbyModel:
    """One step of an exported program. Forcing variables stay as they are at the initial time.

    Diagnostic variables, which are no input, are NaN at step 0.
    """

    def __init__(self, program: torch.export.ExportedProgram, about: dict, seed: int = 0) -> None:
        """about: the content of model.json; seed: of the noise of members, if the model has some."""
        if "later" in about["inputs"]:
            raise ValueError("this model has to be given fields of later times")
        self.program, self.about, self.seed = program, about, seed
        self.names = [NAMES.get(each["name"], each["name"]) for each in about["variables"]]
        roles = [each["role"] for each in about["variables"]]
        self.inputs = [index for index, role in enumerate(roles) if role != "diagnostic"]
        self.outputs = [index for index, role in enumerate(roles) if role != "forcing"]
        self.history, self.step = about["history"], np.timedelta64(about["step_hours"], "h")
        self.device = torch.device("cpu")
        self.module = program.module()

    @classmethod
    def from_pretrained(cls, folder: str, seed: int = 0) -> "RossbyModel":
        """folder: local, or an address that Earth2Studio's Package knows: hf://owner/name, s3://bucket/name."""
        path, extra = Package(folder).resolve("model.pt2"), {"model.json": ""}
        program = torch.export.load(path, extra_files=extra)
        return cls(program, json.loads(extra["model.json"]), seed)

    def to(self, device: torch.device | str) -> "RossbyModel":
        """Move the program to a device, including its constants."""
        self.device = torch.device(device)
        self.program = move_to_device_pass(self.program, self.device)
        self.module = self.program.module()
        return self

    def input_coords(self) -> Coords:
        """Coordinates of the input (B, T, h, V, H, W): the oldest state of the window first."""
        before = self.step * np.arange(1 - self.history, 1)
        return self._coords(before, self.inputs)

    @batch_coords()
    def output_coords(self, input_coords: Coords) -> Coords:
        """Coordinates of the output (B, T, 1, V, H, W). Raises ValueError if the input has others."""
        expected, found = self.input_coords(), input_coords.copy()
        found["lead_time"] = found["lead_time"] - found["lead_time"][-1]
        for index, key in enumerate(expected):
            handshake_dim(found, key, index)
            if key not in ("batch", "time"):
                handshake_coords(found, expected, key)
        output = self._coords(input_coords["lead_time"][-1:] + self.step, self.outputs)
        return output | {key: input_coords[key] for key in ("batch", "time")}

    def _coords(self, lead_time: np.ndarray, channels: list[int]) -> Coords:
        coords = OrderedDict({"batch": np.empty(0), "time": np.empty(0), "lead_time": lead_time})
        coords["variable"] = np.array([self.names[channel] for channel in channels])
        coords["lat"], coords["lon"] = (np.array(self.about[axis]) for axis in ("latitude", "longitude"))
        return coords

    @batch_func()
    def __call__(self, x: Tensor, coords: Coords) -> tuple[Tensor, Coords]:
        """Return the state one step after x, (B, T, 1, V, H, W)."""
        window = self._advance(self._window(x), coords, 0)
        return self._newest(window, x), self.output_coords(coords)

    def create_iterator(self, x: Tensor, coords: Coords) -> Iterator[tuple[Tensor, Coords]]:
        """Yield the initial state, then that of each step: (B, T, 1, V, H, W)."""
        yield from self._iterate(x, coords)

    @batch_func()
    def _iterate(self, x: Tensor, coords: Coords) -> Iterator[tuple[Tensor, Coords]]:
        output, number, window = self.output_coords(coords), 0, self._window(x)
        output["lead_time"] = output["lead_time"] - self.step
        coords = coords.copy()
        while True:
            yield self._newest(window, x), output.copy()
            window = self._advance(window, coords, number)
            number += 1
            coords["lead_time"] = coords["lead_time"] + self.step
            output["lead_time"] = output["lead_time"] + self.step

    def _window(self, x: Tensor) -> Tensor:
        """Return the window (B T, h V, H, W) of an input (B, T, h, V, H, W): newest first, all variables."""
        window = x.new_full((*x.shape[:3], len(self.names), *x.shape[4:]), torch.nan)
        window[:, :, :, self.inputs] = x
        return window.flip(2).flatten(2, 3).flatten(0, 1)

    def _newest(self, window: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of a window's newest state, (B, T, 1, V, H, W)."""
        return window[:, self.outputs].unflatten(0, x.shape[:2]).unsqueeze(2)

    @torch.inference_mode()
    def _advance(self, window: Tensor, coords: Coords, number: int) -> Tensor:
        """Return the window (B T, h V, H, W) after step `number`, from 0."""
        times = coords["time"] + coords["lead_time"][-1]
        seconds = torch.from_numpy(times.astype("datetime64[s]").astype(np.int64))
        members = len(window) // len(seconds)
        arguments, options = [seconds.repeat(members)], {}
        if "keys" in self.about["inputs"]:
            arguments.append(self.seed + torch.arange(members).repeat_interleave(len(seconds)))
        if "steps" in self.about["inputs"]:
            options["steps"] = torch.full((len(window),), number).to(self.device)
        return self.module(window, *(each.to(self.device) for each in arguments), **options)
