"""Settings that cannot work together, and sizes that are numbers but nothing holds."""

import random
from collections.abc import Iterator

import numpy as np
import xarray as xr

from benchmarks.attack_case import Case, refused
from benchmarks.attack_stage import Stage
from tests.test_identity import NAMES

KIND = "combinations"
P = "--parallelism."
# Ranks, options, a word of the answer.
LISTS: list[tuple[int, str, str]] = [
    (3, f"{P}tensor_parallel_degree 2", "tensor_parallel_degree"),
    (2, f"{P}tensor_parallel_degree 4", "tensor_parallel_degree"),
    (4, f"{P}data_parallel_shard_degree 3", "data_parallel_shard_degree"),
    (4, f"{P}data_parallel_shard_degree 0", "data_parallel_shard_degree"),
    (4, f"{P}data_parallel_replicate_degree 3", "data_parallel_replicate_degree"),
    (4, f"{P}tensor_parallel_degree 4", "tensor_parallel_degree"),
    (4, f"{P}context_parallel_degree 4", "context_parallel_degree"),
    (8, f"{P}context_parallel_degree 8 {P}context_parallel_method ring", "context_parallel_degree"),
    (2, f"{P}context_parallel_degree 3", "context_parallel_degree"),
    (4, f"{P}pipeline_parallel_degree 4", "stages"),
    (3, f"{P}pipeline_parallel_degree 3", "stages"),
    (2, f"{P}pipeline_parallel_degree 2 {P}pipeline_parallel_schedule ZBVZeroBubble", "stages"),
    (2, f"{P}pipeline_parallel_degree 2 {P}pipeline_parallel_microbatch_size 3", "microbatch"),
    (2, f"--model.name unet {P}tensor_parallel_degree 2", "tensor_parallel_degree"),
    (2, f"--model.name unet {P}context_parallel_degree 4", "context_parallel_degree"),
    (16, f"--model.name unet {P}context_parallel_degree 16", "context_parallel_degree"),
    (1, f"{P}enable_async_tensor_parallel true", "enable_async_tensor_parallel"),
    (1, "--model.num_heads 3", "num_heads"),
    (1, "--model.dim 18 --model.position sincos", "dim"),
    (1, "--model.attention_backend flash --model.num_heads 4", "flash"),
    (1, "--model.attention_backend cudnn", "attention_backend"),
    (1, "--model.patch_size [7,4]", "patch_size"),
    (1, "--model.patch_size [3,9]", "patch_size"),
    (1, "--model.name unet --activation_checkpoint.mode selective", "activation_checkpoint.mode"),
    (1, "--model.name unet --float8.enable", "float8.enable"),
    (1, "--activation_checkpoint.mode memory_budget", "memory_budget"),
    (1, "--compile.cuda_graphs true", "cuda_graphs"),
    (1, "--validation.lead_hours [7]", "lead_hours"),
    (1, "--validation.lead_hours [6,6]", "lead_hours"),
    (1, "--validation.lead_hours []", "lead_hours"),
    (1, "--validation.lead_hours [6000]", "validation_period"),
    (1, "--data.step_hours 5 --validation.lead_hours [5]", "hours"),
    (1, "--data.step_hours 99999 --validation.lead_hours [99999]", "hours"),
    (1, '--data.train_period ["2020-01-01","2020-01-15"]', "overlaps"),
    (1, '--data.train_period ["2020-01-12","2020-01-01"]', "train_period"),
    (1, '--data.train_period ["1979-01-01","1980-01-01"]', "train_period"),
    (1, '--data.validation_period ["2030-01-01","2030-01-02"]', "validation_period"),
    (1, '--data.train_period ["2020-01-01"]', "train_period"),
    (1, '--data.train_period ["2020-02-30","2020-03-01"]', "train_period"),
    (1, '--data.train_period ["2020-01-01T00","2020-01-01T01"]', "train_period"),
    (1, "--data.grid_shape [32,64]", "grid_shape"),
    (1, "--data.grid_shape [6,0]", "grid_shape"),
    (1, '--data.variables ["2m_temperature"]', "2m_temperature"),
    (1, f'--data.variables ["{NAMES[0]}","{NAMES[0]}"]', "variables"),
    (1, '--data.variables ["temperature"]', "temperature"),
    (1, '--data.variables ["temperature"] --data.levels [850]', "temperature"),
    (1, "--data.variables []", "variables"),
    (1, "--training.variable_weights [1.0]", "variable_weights"),
    (1, "--training.variable_weights [0.0,0.0]", "variable_weights"),
    (1, "--training.global_batch_size 3", "global_batch_size"),
    (2, "--training.global_batch_size 6", "global_batch_size"),
    (1, "--training.global_batch_size 0", "global_batch_size"),
    (1, "--training.variable_weights [1e-46,1e-46]", "variable_weights"),
    (1, "--checkpoint.keep_best val/nonsense", "keep_best"),
    (1, "--checkpoint.keep_best val/loss --validation.interval 0", "keep_best"),
    (1, "--checkpoint.keep_best val/loss --checkpoint.enable false", "keep_best"),
    (1, "--checkpoint.keep_best= --validation.early_stop_patience 2", "early_stop_patience"),
    (1, "--training.steps 4", "steps"),
    (1, "--float8.enable true", "float8"),
]
HUGE = [
    (1, "--model.dim 65536 --model.num_layers 4096 --model.num_heads 64", "GiB"),
    (1, "--model.dim 65536 --model.mlp_dim 1048576 --model.num_heads 64", "GiB"),
    (1, "--model.num_layers 4096 --model.dim 16384 --model.num_heads 64", "GiB"),
    (1, "--model.name unet --model.width 65536 --model.levels 1", "width"),
    (1, "--model.name unet --model.levels 20", "levels"),
    (1, "--training.local_batch_size 65536", "GiB"),
    (1000, "", ""),
    (999_999, "", "NGPU"),
]


def cases(stage: Stage, _: random.Random) -> Iterator[Case]:
    """On the run's own folder, of which nothing may change; huge ones on a larger grid."""
    for ranks, text, word in LISTS:
        command = ["checks" if ranks > 1 else "train", *stage.options(stage.run, *text.split())]
        name = f"{ranks} ranks {text}"
        yield Case(KIND, name, command, refused(word), {"NGPU": str(ranks)}, keeps=stage.run)
    path = stage.scratch / "large.zarr"
    write_large(str(path))
    for ranks, text, word in HUGE:
        folder = stage.fresh(f"huge {text[:60]} {ranks}")
        command = ["checks", *stage.options(folder, "--data.path", str(path), *text.split())]
        yield Case(KIND, f"{ranks} ranks {text}", command, refused(word), {"NGPU": str(ranks)}, limit=20.0)


def write_large(path: str) -> None:
    """512 x 1024 points of zeros, all of them one chunk that is compressed to nothing."""
    axes = {
        "time": np.datetime64("2020-01-01", "ns") + np.arange(70) * np.timedelta64(6, "h"),
        "latitude": np.linspace(89.9, -89.9, 512),
        "longitude": np.arange(1024) * 360 / 1024,
    }
    zeros = np.zeros((70, 512, 1024), "f4")
    ds = xr.Dataset({name: (list(axes), zeros, {"units": "m s-1"}) for name in NAMES}, axes)
    encoding = {name: {"chunks": (1, 512, 1024)} for name in NAMES}
    ds.to_zarr(path, zarr_format=2, encoding=encoding)
