"""train.py's assembly and step on one batch of random fields that stays on the device."""

from contextlib import nullcontext

import torch
import torch.distributed as dist

from config import Config
from datasets.grid import area_weights, global_grid
from parallelisms.mesh import mesh_of
from training.assembly import (
    Fields,
    assemble,
    build_objective,
    build_run_state,
    build_update,
)
from training.due import GlobalBatch
from training.no_checkpoints import NoCheckpoints
from training.step import Step, train_step


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
        self.config, self.device, self.number = config, device, 0
        fields = Fields.standard(config, global_grid(grid_shape), num_variables)
        mesh, memory = mesh_of(config.parallelism, device), nullcontext() if drawn_here else None
        self.assembly = assemble(config, fields, mesh, device, memory=memory)
        self.model = self.assembly.model
        if drawn_here:
            self._draw_weights()
        area = area_weights(fields.grid.latitude)
        self.objective = build_objective(config, self.assembly, area)
        self.run = build_run_state(config, self.model)
        shape = (config.training.local_batch_size, 2, num_variables, *grid_shape)
        self.fields = torch.randn(shape, device=device)
        self.batches = [(self.fields, torch.zeros(shape[0], dtype=torch.int64, device=device))] * accumulation
        self.global_batch = GlobalBatch.of_micro_batches(accumulation, shape[0] * mesh.degrees.dp)
        parts = (self.model, self.run, NoCheckpoints(), self.objective.loss_part, self.global_batch)
        self.update = build_update(config, *parts)
        self.model.train()

    def _draw_weights(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.parameters.items():
                std = self.assembly.meta_model.initial_std(name)
                start = 0.0 if std is not None or name.endswith("bias") else 1.0
                torch.nn.init.normal_(parameter, start, std or 0.0)

    def step(self) -> Step:
        self.number += 1
        taken = train_step(self.number, self.batches, self.objective, self.model, self.update)
        self.run.progress.advance(self.global_batch.at(self.number))
        return taken

    def loss(self) -> float:
        """Of a step, over all ranks."""
        loss = self.step().loss
        dist.all_reduce(loss)
        return loss.item() / self.model.mesh.degrees.dp
