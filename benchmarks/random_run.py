"""train.py's assembly and step on one batch of random fields that stays on the device."""

from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from config import Config
from datasets.grid import area_weights, global_grid
from parallelisms.mesh import mesh_of
from training.assembly import Fields, assemble
from training.batches import Batch
from training.state import build_state
from training.step import Run, StepResult, train_step


class RandomRun:
    """What a configuration trains, on fields of a global grid (H, W) with statistics 0 and 1.

    drawn_here: weights are drawn on the device, in no time, and are not those of (seed, name). The process
    group is there already (parallelisms/mesh.py, `start_ranks`).
    """

    def __init__(
        self,
        config: Config,
        grid_shape: tuple[int, int],
        num_variables: int,
        device: torch.device,
        drawn_here: bool = False,
        accumulation: int = 1,
    ) -> None:
        self.device, self.number = device, 0
        if not config.data.variables:
            names = tuple(f"variable {number}" for number in range(num_variables))
            config = replace(config, data=replace(config.data, variables=names))
        fields = Fields.standard(config, global_grid(grid_shape), num_variables)
        self.config = config
        mesh, memory = mesh_of(config.parallelism, device), nullcontext() if drawn_here else None
        self.assembly = assemble(config, fields, mesh, device, memory=memory)
        self.model = self.assembly.model
        with torch.no_grad():
            for name, parameter in self.model.parameters.items() if drawn_here else ():
                std = self.assembly.meta_model.initial_std(name)
                start = 0.0 if std is not None or name.endswith("bias") else 1.0
                torch.nn.init.normal_(parameter, start, std or 0.0)
        area, self.state = area_weights(fields.grid.latitude), build_state(config, self.assembly)
        states = config.data.history + max(config.training.rollout_steps)
        shape = (config.training.local_batch_size, states, num_variables, *grid_shape)
        self.fields = torch.randn(shape, device=device)
        batch = Batch(self.fields, torch.zeros(shape[0], dtype=torch.int64, device=device))
        self.batches = [batch] * accumulation
        self.global_batch = accumulation * shape[0] * mesh.degrees.dp
        self.run = Run(config, self.assembly, self.state, area, self.global_batch)
        self.objective = self.run.objective
        self.model.train()

    def step(self) -> StepResult:
        self.number += 1
        result = train_step(self.run, self.number, self.batches)
        self.state.progress.advance(self.global_batch)
        return result

    def loss(self) -> float:
        loss = self.step().loss
        dist.all_reduce(loss)
        return loss.item() / self.model.mesh.degrees.dp
