"""Writes what starts a run on a cluster, shows it, and submits it where --submit is given.

    ./run_train.sh --launch slurm --job.config_file F --nodes 4 --gpus-per-node 8 --time 24:00:00
    ./run_train.sh --launch kubernetes --job.config_file F --nodes 4 --gpus-per-node 8 --image I --claim C

Any --section.key value may stand between; docs/launch.md explains it. Exit codes: 0 written, 1 it could not
be submitted, 2 bad input.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from command_line import OneLineParser
from errors import FAILED, ConfigError, end_when_interrupted, nearest, one_line_errors, refuse, tell
from launch import kubernetes, slurm
from launch.options import add_common, num_ranks
from training.config_checks import load_checked

KINDS = {"slurm": slurm, "kubernetes": kubernetes}


def split_kind(argv: list[str]) -> tuple[str, list[str]]:
    """What --launch names, and all other words. ConfigError."""
    at = next(i for i, word in enumerate(argv) if word.partition("=")[0] == "--launch")
    _, given, kind = argv[at].partition("=")
    rest = argv[at + 1 :]
    if not given:
        kind, rest = (rest[0], rest[1:]) if rest else ("", rest)
    if kind not in KINDS:
        refuse("--launch", kind, nearest(kind, KINDS))
    return kind, argv[:at] + rest


def parse(argv: list[str]) -> tuple[str, argparse.Namespace, list[str]]:
    """What --launch names, its options, and those of the configuration. ConfigError."""
    kind, words = split_kind(argv)
    parser = OneLineParser("launch", __doc__)
    parser.prog = f"./run_train.sh --launch {kind}"
    add_common(parser)
    KINDS[kind].add_options(parser)
    options, arguments = parser.parse_known_args(words)
    check_words(arguments, parser.format_usage())
    return kind, options, arguments


def main(argv: list[str]) -> int:
    kind, options, arguments = parse(argv)
    launcher = KINDS[kind]
    # The layout is checked on the ranks that are going to be.
    os.environ |= {"NNODES": str(options.nodes), "NGPU": str(num_ranks(options))}
    config = load_checked(arguments)
    path = Path(options.script or f"{Path(config.job.config_file).stem}{launcher.SUFFIX}")
    text = launcher.write(options, config, arguments)
    save(path, text)
    print(text)
    if not config.checkpoint.enable:
        tell("checkpoint.enable is false: a run that is stopped begins anew; add --checkpoint.enable")
    return submit([*launcher.SUBMIT, str(path)], options.submit)


def check_words(arguments: list[str], usage: str) -> None:
    """ConfigError: a launcher's option that is misspelt. What has a dot is the configuration's."""
    known = [word.strip("[]") for word in usage.split() if word.startswith("[--")]
    for word in arguments:
        if word.startswith("--") and "." not in word.partition("=")[0]:
            raise ConfigError(f"{word}: not an option; {nearest(word, known)}")


def save(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        refuse("--script", str(path), f"{error.strerror}; name another place")


def submit(command: list[str], asked: bool) -> int:
    """Says the command, or runs it. The exit code."""
    if not asked:
        tell(f"written to {command[-1]}; it is started by: {' '.join(command)}")
        return 0
    if not shutil.which(command[0]):
        refuse(
            "--submit", True, f"{command[0]} is not on this machine; run `{' '.join(command)}` where it is"
        )
    return FAILED if subprocess.run(command, check=False).returncode else 0


if __name__ == "__main__":
    end_when_interrupted()
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
