"""The JobSet of a run, from launch/jobset.yaml."""

import argparse
import json
import os
import re
from pathlib import Path

from config import PROJECT, Config
from errors import refuse
from launch.forms import filled
from launch.options import num_ranks, setting, word

SUFFIX = ".yaml"
SUBMIT = ("kubectl", "apply", "-f")
MOUNT, IN_IMAGE = "/runs", "/rossby"
LONGEST_NAME = 40  # what Kubernetes adds to it has to stay a host's name, of 63 letters
name = word(
    rf"[a-z]([a-z0-9-]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?", "small letters, digits and dashes, at most 40"
)
image = word(r"[\w.:/@-]+", "the name of an image")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--image", type=image, required=True, help="made from launch/Dockerfile")
    add("--claim", type=name, required=True, help=f"PersistentVolumeClaim of data and runs: {MOUNT} in a pod")
    add("--name", type=name, help="of the run in the cluster (default: rossby-<name of the configuration>)")
    select = "of the nodes that may be taken: a label and its value; may be given again"
    add("--node-selector", type=setting, action="append", default=[], metavar="NAME=VALUE", help=select)
    more = "what a pod gets besides, such as vpc.amazonaws.com/efa=32; may be given again"
    add("--resource", type=setting, action="append", default=[], metavar="NAME=NUMBER", help=more)


def write(options: argparse.Namespace, config: Config, arguments: list[str]) -> str:
    """arguments: of train.py, whose paths are those in a pod, but for the configuration's, which is ours."""
    ranks = num_ranks(options)
    limits = dict(each.split("=", 1) for each in options.resource)
    if options.gpus_per_node:
        limits["nvidia.com/gpu"] = str(options.gpus_per_node)
    stem = re.sub(r"[^a-z0-9]+", "-", Path(config.job.config_file).stem.lower()).strip("-")
    return filled(
        "jobset.yaml",
        name=options.name or f"rossby-{stem}"[:LONGEST_NAME].rstrip("-"),
        nodes=options.nodes,
        ranks=ranks,
        restarts=options.restarts,
        # Without checkpoints it would begin anew, for ever.
        saved="Ignore" if config.checkpoint.enable else "FailJob",
        image=options.image,
        claim=options.claim,
        mount=MOUNT,
        arguments=lines(20, [f"- {quoted(each)}" for each in arguments_in_pod(config, arguments)]),
        fabric=options.fabric or "",
        nccl_debug="INFO" if options.nccl_debug else "",
        cpus=ranks * options.cpus_per_rank,
        limits=mapping(22, limits) if limits else " " * 22 + "{}",
        selector=selector(options.node_selector),
    ).replace("\n\n", "\n")


def arguments_in_pod(config: Config, arguments: list[str]) -> list[str]:
    """ConfigError: the configuration is not in the image. A run without a folder lies in the claim."""
    file = Path(os.path.abspath(config.job.config_file))
    if not file.is_relative_to(PROJECT):
        refuse("job.config_file", str(file), f"is not in the image; put it into {PROJECT.name}/train_configs")
    folder = [] if config.job.dump_folder else ["--job.dump_folder", f"{MOUNT}/{file.stem}"]
    named = ["--job.config_file", f"{IN_IMAGE}/{file.relative_to(PROJECT)}"]
    return [*arguments, *named, *folder]  # of two the later counts


def quoted(argument: str) -> str:
    """Kubernetes puts variables into $(NAME), and two dollars are one."""
    return json.dumps(argument.replace("$(", "$$("))


def lines(indent: int, texts: list[str]) -> str:
    return "\n".join(" " * indent + text for text in texts)


def mapping(indent: int, values: dict[str, str]) -> str:
    return lines(indent, [f"{key}: {json.dumps(value)}" for key, value in values.items()])


def selector(labels: list[str]) -> str:
    if not labels:
        return ""
    chosen = dict(each.split("=", 1) for each in labels)
    return f"{' ' * 14}nodeSelector:\n{mapping(16, chosen)}"
