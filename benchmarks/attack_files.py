"""Files of a run's folder that are cut short, flipped, foreign or forged: rebuilt, or named in one line."""

import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from benchmarks.attack_case import Case, Right, either, refused, runs, warned
from benchmarks.attack_stage import MORE, STEPS, Stage

KIND = "files"
NEWEST = f"checkpoints/step-{STEPS:08d}"
RESUMED = (
    *(f"{NEWEST}/{name}" for name in (".metadata", "__0_0.distcp", "config.toml", "manifest.json")),
    "config.toml",
    "metrics.jsonl",
    "statistics.npz",
    "best/best.json",
    f"best/step-{STEPS:08d}/__0_0.distcp",
)
FORECAST = "forecast.zarr"
CLIMATOLOGY = "evaluation/climatology.zarr"
U = "10m_u_component_of_wind"
STORED = {
    "forecast": (f"{FORECAST}/.zattrs", f"{FORECAST}/.zmetadata", f"{FORECAST}/{U}/.zarray"),
    "evaluate": (
        f"{FORECAST}/.zmetadata",
        f"{FORECAST}/{U}/3.1.0.0",
        f"{FORECAST}/time/0",
        f"{CLIMATOLOGY}/.zattrs",
        f"{CLIMATOLOGY}/.zmetadata",
        f"{CLIMATOLOGY}/{U}/1.0.0",
        f"{CLIMATOLOGY}/hour/0",
    ),
}
Damage = Callable[[bytes, random.Random], bytes]


def flip(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


DAMAGES: dict[str, Damage] = {
    "empty": lambda *_: b"",
    "half": lambda content, _: content[: len(content) // 2],
    "all but one byte": lambda content, _: content[:-1],
    "one bit": flip,
}


CHUNK = re.compile(r"\.zarr/.*/[\d.]+$")


class Exploit:
    """A pickle that makes a file when it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def cases(stage: Stage, rng: random.Random) -> Iterator[Case]:
    for name in RESUMED:
        for how, damage in DAMAGES.items():
            yield resumed(stage, f"{name}, {how}", damaging(name, damage, rng.random()))
    for verb, names in STORED.items():
        for name in names:
            for how, damage in DAMAGES.items():
                if how == "one bit" and CHUNK.search(name):
                    continue  # Zarr 2 has no checksums: another value, which only its disk can know
                yield stored(stage, verb, f"{name}, {how}", damaging(name, damage, rng.random()))
    yield from foreign(stage)
    yield from missing(stage)
    yield from forged(stage)


def damaging(name: str, damage: Damage, seed: float) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(damage(path.read_bytes(), random.Random(seed)))

    return change


def resumed(stage: Stage, name: str, change: Callable[[Path], object], right: Right | None = None) -> Case:
    """Ends with the losses of the run that nobody disturbed, whatever it resumes from."""
    folder = stage.fresh(f"resumed {name}")
    command = ["train", *stage.options(folder, "--training.steps", str(MORE))]
    right = right or runs(stage.goes_on(folder))
    return Case(KIND, f"resume: {name}", command, right, prepare=stage.copying(folder, change))


def stored(stage: Stage, verb: str, name: str, change: Callable[[Path], object]) -> Case:
    """Refused naming the file, or as good as if nothing had happened."""
    folder = stage.fresh(f"{verb} {name}")

    def check() -> str:
        made = FORECAST if verb == "forecast" else "evaluation/scores.nc"
        opener = xr.open_zarr if verb == "forecast" else xr.open_dataset
        try:
            with opener(folder / made) as ours, opener(stage.run / made) as theirs:
                same = ours.drop_attrs().identical(theirs.drop_attrs())
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            return f"{made} cannot be read: {type(error).__name__}"
        return "" if same else f"another {made}"

    right = either(runs(check), refused(), refused(code=1))
    return Case(
        KIND, f"{verb}: {name}", [verb, *stage.options(folder)], right, prepare=stage.copying(folder, change)
    )


def foreign(stage: Stage) -> Iterator[Case]:
    """Entries among the checkpoints that no run has made: named, and left alone."""

    def link(folder: Path) -> None:
        (folder / "checkpoints/step-00000099").symlink_to(stage.run / NEWEST)

    def link_incomplete(folder: Path) -> None:
        (folder / "checkpoints/step-00000009.incomplete").symlink_to(stage.data)

    def file(folder: Path) -> None:
        (folder / "checkpoints/notes.txt").write_text("keep me")

    def strangers(folder: Path) -> None:
        (folder / "checkpoints/step-backup").mkdir()
        (folder / "checkpoints/step-backup/keep").write_text("me")

    entries = {
        "a link with a checkpoint's name": (link, "checkpoints/step-00000099/manifest.json"),
        "a link to the data": (link_incomplete, "checkpoints/step-00000009.incomplete/.zgroup"),
        "a text": (file, "checkpoints/notes.txt"),
        "a stranger's folder": (strangers, "checkpoints/step-backup/keep"),
    }
    for name, (change, kept) in entries.items():
        folder = stage.fresh(f"resumed {name}")

        def check(folder: Path = folder, kept: str = kept) -> str:
            return stage.goes_on(folder)() if (folder / kept).exists() else f"{kept} is gone"

        said = Path(kept).parts[1]
        yield resumed(stage, name, change, warned(rf"{said}.*left alone", check))


def missing(stage: Stage) -> Iterator[Case]:
    """Files that are not there any more."""
    for name in (*RESUMED, "checkpoints", "best"):

        def remove(folder: Path, name: str = name) -> None:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

        yield resumed(stage, f"{name}, removed", remove)


def forged(stage: Stage) -> Iterator[Case]:
    """Metadata that would run a command, with a manifest that vouches for it: no checkpoint."""
    proof = stage.scratch / "proof"

    def forge(folder: Path) -> None:
        (folder / NEWEST / ".metadata").write_bytes(pickle.dumps(Exploit(proof)))

    def check(folder: Path) -> str:
        return "the pickle was executed" if proof.exists() else stage.goes_on(folder)()

    def attempt(name: str, change: Callable[[Path], None], said: str) -> Case:
        folder = stage.fresh(f"resumed {name}")
        return resumed(stage, name, change, warned(said, lambda: check(folder)))

    def vouched(folder: Path) -> None:
        forge(folder)
        vouch(folder / NEWEST)

    def statistics(folder: Path) -> None:
        np.savez(folder / "statistics.npz", mean=np.array(Exploit(proof), object))

    yield attempt("a malicious pickle", forge, "damaged|refused|not those")
    yield attempt("a malicious pickle, vouched for", vouched, "posix.mkdir")
    yield attempt("a pickle in statistics.npz", statistics, "damaged")


def vouch(checkpoint: Path) -> None:
    """A manifest whose checksums are those of the files that are there."""
    from checkpoints.files import crc32_of, read_manifest, write_manifest

    about = read_manifest(checkpoint)
    files = {
        name: ((checkpoint / name).stat().st_size, crc32_of(checkpoint / name)) for name in about["files"]
    }
    write_manifest(checkpoint, {key: value for key, value in about.items() if key != "files"}, files)
