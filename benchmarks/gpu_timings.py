"""The parts of benchmarks/gpu.sh that share a process, by name: torch and CUDA are started once for all."""

from collections.abc import Callable

from benchmarks.gpu_data import loader, save
from benchmarks.gpu_kernels import activations, attention, optimizers, products
from benchmarks.gpu_peers import peers
from benchmarks.gpu_session import Session
from benchmarks.gpu_step import planner, rollout, steps

PARTS_BY_NAME: dict[str, Callable[[Session], None]] = {
    "steps": steps,
    "attention": attention,
    "save": save,
    "loader": loader,
    "peers": peers,
    "rollout": rollout,
    "planner": planner,
    "products": products,
    "optimizers": optimizers,
    "activations": activations,
}
