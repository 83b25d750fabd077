"""Measurement of a configuration's steps on this machine, in a folder for plan.py --anchor."""

import json
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from command_line import to_toml
from config import Config, in_project
from datasets.grid import Grid, area_weights
from jobs.durable_files import write_durably
from parallelisms.mesh import PATIENCE, mesh_of, start_ranks
from training.assembly import Fields, assemble
from training.batches import Batch
from training.process_settings import retain_memory, set_determinism
from training.state import build_state
from training.step import Run, train_step

CALIBRATION = Path(in_project("outputs/calibration"))
FEWEST, MOST, SECONDS = 4, 20, 30.0  # numbers of steps; after SECONDS no further ones


def calibrate(config: Config, grid: Grid, num_variables: int, folder: Path) -> None:
    """Measure steps of `config` on random fields, on one rank, and write them as a run does.

    A step is one micro-batch, with the longest rollout. The first half, which warms up, is not counted
    (planning/known_runs.py, run_record).
    """
    config = replace(config, training=replace(config.training, global_batch_size=-1))
    seconds = measure_steps(config, grid, num_variables)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": n, "step_seconds": each}) for n, each in enumerate(seconds, 1)]
    write_durably(folder / "config.toml", to_toml(config))
    write_durably(folder / "status.json", json.dumps({"ranks": 1}) + "\n")
    write_durably(folder / "metrics.jsonl", "\n".join(lines) + "\n")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    write_durably(folder / "starts.jsonl", json.dumps({"step": 0, "device": device}) + "\n")


def measure_steps(config: Config, grid: Grid, num_variables: int) -> list[float]:
    """Return the seconds of train.py's steps, without reading data."""
    training, seconds = config.training, []
    set_determinism(training.deterministic)
    device = start_ranks(PATIENCE)
    try:
        retain_memory(device)
        fields = Fields.standard(config, grid, num_variables)
        assembly = assemble(config, fields, mesh_of(config.parallelism, device), device)
        batch_size, states = training.local_batch_size, config.data.history + training.states_ahead
        area, state = area_weights(grid.latitude), build_state(config, assembly)
        run = Run(config, assembly, state, area, batch_size)
        values = torch.randn((batch_size, states, num_variables, *grid.shape), device=device)
        batch = Batch(values, torch.zeros(batch_size, dtype=torch.int64, device=device))
        assembly.model.train()
        while len(seconds) < FEWEST or (len(seconds) < MOST and sum(seconds) < SECONDS):
            started = time.perf_counter()
            train_step(run, training.steps, [batch]).loss.item()  # waits for the device
            seconds.append(time.perf_counter() - started)
    finally:
        dist.destroy_process_group()
    return seconds
