"""A conversion from its first date to its last: begun, gone on with after a kill, appended to.

Only one process writes a store at a time, and only its own word in the journal says what is done.
"""

import fcntl
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from archives.files import is_url
from archives.float16 import STATEMENT
from archives.training_store import FORMAT, JOURNAL, Field, TrainingStore, create, read_attributes
from archives.variables import plain_units, units
from conversion.moments import Moments
from conversion.parallel import Progress, run_parts
from conversion.parts import Source, convert_part, cut_into_parts, estimate_packing, memory_of
from conversion.source import chosen_dates, open_source, static_fields
from errors import ConfigError, RunFailed, without_secrets

# What a store is made with, and what may differ when dates are appended to one that is complete.
FIXED = ("variables", "levels", "static", "region", "grid", "grid_like", "method", "dtype", "rows", "select")
OF_ONE_RUN = ("source", "period")


def convert(options: Namespace) -> None:
    """Begins a store, goes on with it or appends to it. Raises ConfigError, DataError, RunFailed."""
    source = open_source(options)
    rows = chosen_dates(source, options.period)
    target = Path(options.target)
    check_target(target)
    with failing_in_one_line(target):
        target.mkdir(parents=True, exist_ok=True)
        write(target, source, rows, options)


@contextmanager
def failing_in_one_line(target: Path) -> Iterator[None]:
    """RunFailed for what a disk does."""
    try:
        yield
    except OSError as error:
        reason = f"{type(error).__name__}: {error.strerror or error}"
        again = "the same command goes on where this stopped"
        raise RunFailed(f"TARGET {str(target)!r} cannot be written ({reason}); {again}") from None


def write(target: Path, source: Source, rows: np.ndarray, options: Namespace) -> None:
    """What `convert` promises, with the target to itself."""
    with only_writer(target):
        if not is_begun(target):
            begin(target, source, rows, options)
        store = TrainingStore(target)
        check_options(store, source, options)
        if store.is_begun():
            write_dates(store, source, options)
        store.tidy()
        later = later_dates(store, source.archive.times[rows])
        if len(later):
            store.begin(later, of_this_run(options))
            write_dates(store, source, options)
        tell_size(store)


def check_target(target: Path) -> None:
    """ConfigError: something else lies there."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() and FORMAT not in read_attributes(target) and not is_rubble(target):
        raise ConfigError(
            f"TARGET {str(target)!r}: exists and is no training store; name another or remove it"
        )


def is_rubble(target: Path) -> bool:
    """Whether a beginning was killed before its first file had its name."""
    return target.is_dir() and all(path.name.endswith(".partial") for path in target.iterdir())


def is_begun(target: Path) -> bool:
    """Whether there is a store to go on with: its journal is the last thing that `create` writes."""
    return (target / JOURNAL).exists() or bool(read_attributes(target).get("complete"))


@contextmanager
def only_writer(target: Path) -> Iterator[None]:
    """ConfigError: another process is writing there. The kernel opens the lock when its holder ends."""
    descriptor = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(
            f"TARGET {str(target)!r}: another process is writing it; wait for its end"
        ) from None
    finally:
        os.close(descriptor)


def begin(target: Path, source: Source, rows: np.ndarray, options: Namespace) -> None:
    """An empty store for the dates (n,) of the source; what a killed beginning has left is removed."""
    for leftover in target.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    packing = estimate_packing(source, rows) if options.dtype == "float16" else {}
    fields = [Field(name, units_of(source, name), packing.get(name)) for name in source.variables]
    static = static_fields(source, options.static)
    shown = {name: (values, units_of(source, name)) for name, values in static.items()}
    attributes = {"complete": False, "options": fixed(options)}
    attributes |= {"sources": [named_source(options)]}
    attributes |= {
        "accuracy": STATEMENT if packing else "as in the source",
        "largest_error": {},
        "moments": {},
    }
    times, run = source.archive.times[rows], of_this_run(options)
    create(target, fields, shown, source.grid, times, options.rows, attributes, run)


def units_of(source: Source, name: str) -> str:
    """Ours where the source means the same, else what it says."""
    said = plain_units(source.archive.units(name)) if name in source.archive.variables else ""
    return said or units(name)


def fixed(options: Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in FIXED}


def of_this_run(options: Namespace) -> dict[str, Any]:
    return {"source": named_source(options), "period": options.period}


def named_source(options: Namespace) -> str:
    """From whatever folder the command is given again."""
    text = options.source
    return without_secrets(text if is_url(text) else os.path.abspath(text))


def check_options(store: TrainingStore, source: Source, options: Namespace) -> None:
    """ConfigError naming the first option that the store was not begun with."""
    asked, known = fixed(options), store.attributes["options"]
    if store.is_begun():
        asked, known = asked | of_this_run(options), known | store.begun_run()
    for name, value in asked.items():
        if value != known[name]:
            shown = "SOURCE" if name == "source" else f"--{name}"
            was = known[name] if known[name] not in ("", [], None, 0) else "nothing"
            raise ConfigError(
                f"{shown} {value!r}: {str(store.path)!r} was begun with {was!r}; take that, or another TARGET"
            )
    if not source.grid.same_as(store.grid()):
        raise ConfigError(f"SOURCE {options.source!r}: its grid {source.grid.shape} is not the store's")


def later_dates(store: TrainingStore, times: np.ndarray) -> np.ndarray:
    """Those of the source (n,) that the store has not got. ConfigError: some of them lie among its own."""
    new = times[~np.isin(times, store.times)]
    if len(new) and new[0] < store.times[-1]:
        raise ConfigError(
            f"SOURCE has {new[0]}, which {str(store.path)!r} lacks among its own dates, up to "
            f"{store.times[-1]}: only later ones can be appended; take --period, or another TARGET"
        )
    return new


def write_dates(store: TrainingStore, source: Source, options: Namespace) -> None:
    """All that the journal says is to be written, and the last word: complete."""
    old, summaries = store.resume()
    times = store.times
    parts = cut_into_parts(source, store, old, len(times))
    pending = [part for part in parts if part.name not in summaries]
    tell_plan(store, parts, pending, len(times) - old, options)
    progress = Progress(len(parts), len(parts) - len(pending))

    def done(name: str, summary: dict[str, Any]) -> None:
        store.note(name, summary)
        summaries[name] = summary
        progress.advance()

    try:
        work = partial(convert_part, source, str(store.path.absolute()))
        run_parts(work, pending, done, options.workers, options.scheduler)
    finally:
        progress.close()
    finish(store, [(part, summaries[part.name]) for part in parts], old, options)


def finish(store: TrainingStore, parts: list, old: int, options: Namespace) -> None:
    """parts: (part, its summary), all of them."""
    valid = np.zeros((len(store.times) - old, len(store.variables)), np.uint8)
    largest = dict(store.attributes["largest_error"])
    moments = {name: Moments.read(plain) for name, plain in store.attributes["moments"].items()}
    for part, summary in parts:
        columns = [store.variables.index(name) for name in summary["variables"]]
        valid[part.start - old : part.stop - old, columns] = summary["valid"]
        for name, error, own in zip(summary["variables"], summary["error"], summary["moments"], strict=True):
            largest[name] = max(largest.get(name, 0.0), error)
            moments[name] = moments.get(name, Moments()).merged(Moments.read(own))
    sources = dict.fromkeys([*store.attributes["sources"], named_source(options)])
    errors = {name: largest[name] for name in store.variables}
    plain = {name: moments[name].plain() for name in store.variables}
    store.finish(valid, {"sources": list(sources), "largest_error": errors, "moments": plain})


def tell_plan(store: TrainingStore, parts: list, pending: list, dates: int, options: Namespace) -> None:
    memory = memory_of(pending, store) / 2**30
    where = f"on {options.scheduler}" if options.scheduler else f"in {options.workers} process(es)"
    before = f", {len(parts) - len(pending)} of them done before" if len(parts) > len(pending) else ""
    print(
        f"{store.path}: {dates} dates of {len(store.variables)} variables on {store.grid_shape[0]} x "
        f"{store.grid_shape[1]} points as {options.dtype}: {len(parts)} parts{before}, {where}, "
        f"at most {memory:.1f} GiB each",
        flush=True,
    )


def tell_size(store: TrainingStore) -> None:
    files = [path.stat().st_size for path in store.path.rglob("*") if path.is_file()]
    size = f"{sum(files) / 1e9:.3g} GB in {len(files)} files"
    print(f"{store.path}: complete, {len(store.times)} dates to {store.times[-1]}, {size}")
