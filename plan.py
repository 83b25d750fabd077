"""What a run needs, before the cluster is booked.

.venv/bin/python plan.py --job.config_file train_configs/vit1b.toml --dry_run --world_size 64
"""

import argparse
import os
import time

from config import Config, ConfigError, one_line_errors, start


def main() -> None:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--dry_run", action="store_true")
    own.add_argument("--world_size", type=int, default=1)
    options, rest = own.parse_known_args()
    if {"--help", "-h"} & set(rest):
        print(__doc__)
    with one_line_errors():
        if not 1 <= options.world_size <= 4096:
            raise ConfigError(f"--world_size {options.world_size}: give 1 to 4096 ranks")
    os.environ["WORLD_SIZE"] = str(options.world_size)  # what the degrees are checked against
    config = start(rest)
    if not options.dry_run:
        with one_line_errors():
            raise ConfigError(
                "plan.py: say what to do: --dry_run builds the layout and runs one step without memory"
            )
    dry_run_table(config, options.world_size)


def dry_run_table(config: Config, world_size: int) -> None:
    from datasets.variables import expand_levels
    from planning.dry_run import dry_run  # here: it takes torch's seconds

    with one_line_errors():
        grid_shape, periodic = grid_of(config)
        variables = expand_levels(config.data.variables, config.data.levels)
        if config.parallelism.pipeline_parallel_schedule not in ("GPipe", "1F1B"):
            schedule = config.parallelism.pipeline_parallel_schedule
            raise ConfigError(
                f"parallelism.pipeline_parallel_schedule = {schedule!r}: a dry run knows GPipe and 1F1B"
            )
    started = time.perf_counter()
    result = dry_run(config, world_size, grid_shape, len(variables), periodic)
    print(f"{result.table()}\n\nno rank was started; {time.perf_counter() - started:.0f} s")


def grid_of(config: Config) -> tuple[tuple[int, int], bool]:
    """From data.grid_shape, which is taken to go round the globe, or from the data themselves."""
    if all(config.data.grid_shape):
        return config.data.grid_shape, True
    from datasets.selection import open_selection

    grid = open_selection(config.data, config.model.patch_size, ()).archive.grid
    return grid.shape, grid.periodic


if __name__ == "__main__":
    main()
