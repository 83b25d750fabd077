"""Optimisers in float64, written from their papers without code or shards of the library."""

import math
from collections.abc import Callable

import numpy as np

Arrays = dict[str, np.ndarray]
LR, BETAS, EPS, MOMENTUM = 1e-2, (0.9, 0.95), 1e-4, 0.95
CAP, COEFFICIENT = 10.0, 1e-3
Step = Callable[[np.ndarray, np.ndarray, list[np.ndarray], int, float], np.ndarray]


def trained(name: str, weights: Arrays, gradients: list[Arrays], decay: float, lr: float = LR) -> Arrays:
    """Weights after a step with each of `gradients`."""
    found = {key: value.astype(np.float64) for key, value in weights.items()}
    states = {key: [np.zeros(w.shape), np.zeros(w.shape)] for key, w in found.items()}
    for number, grads in enumerate(gradients, start=1):
        for key, weight in found.items():
            matrix = weight.ndim > 1 and "position." not in key
            step = RULES[name] if matrix and not (name == "Muon" and not key.startswith("blocks.")) else None
            step = step or (sgd if name in ("SGD", "LARS") else adamw)
            gradient = grads[key].astype(np.float64)
            found[key] = weight - lr * step(weight, gradient, states[key], number, decay * matrix)
    return found


def adam(g: np.ndarray, state: list[np.ndarray], number: int) -> np.ndarray:
    """Kingma and Ba 2015, algorithm 1."""
    for power, beta in enumerate(BETAS):
        state[power] = beta * state[power] + (1 - beta) * g ** (power + 1)
    first, second = (moment / (1 - beta**number) for moment, beta in zip(state, BETAS, strict=True))
    return first / (np.sqrt(second) + EPS)


def adamw(w: np.ndarray, g: np.ndarray, state: list[np.ndarray], number: int, decay: float) -> np.ndarray:
    """Loshchilov and Hutter 2019, algorithm 2."""
    return adam(g, state, number) + decay * w


def lamb(w: np.ndarray, g: np.ndarray, state: list[np.ndarray], number: int, decay: float) -> np.ndarray:
    """You et al. 2020, algorithm 2."""
    u = adam(g, state, number) + decay * w
    return u * (min(np.linalg.norm(w) / np.linalg.norm(u), CAP) if w.any() and u.any() else 1.0)


def sgd(w: np.ndarray, g: np.ndarray, state: list[np.ndarray], number: int, decay: float) -> np.ndarray:
    """As torch.optim.SGD's documentation has it."""
    state[0] = MOMENTUM * state[0] + g + decay * w
    return state[0]


def lars(w: np.ndarray, g: np.ndarray, state: list[np.ndarray], number: int, decay: float) -> np.ndarray:
    """You, Gitman and Ginsburg 2017, algorithm 1, the learning rate outside the momentum."""
    step = np.linalg.norm(g) + decay * np.linalg.norm(w)
    ratio = min(COEFFICIENT * np.linalg.norm(w) / step, CAP) if w.any() and step else 1.0
    return sgd(w, ratio * (g + decay * w), state, number, 0.0)


def muon(w: np.ndarray, g: np.ndarray, state: list[np.ndarray], number: int, decay: float) -> np.ndarray:
    """Jordan et al. 2024 with the scale of Liu et al. 2025; the quintic acts on singular values alone."""
    state[0] = MOMENTUM * state[0] + (1 - MOMENTUM) * g
    update = (1 - MOMENTUM) * g + MOMENTUM * state[0]
    u, s, v = np.linalg.svd(update.reshape(len(w), -1), full_matrices=False)
    s = s / max(float(np.linalg.norm(s)), 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    scale = 0.2 * math.sqrt(max(u.shape[0], v.shape[1]))
    return scale * ((u * s) @ v).reshape(w.shape) + decay * w


RULES: dict[str, Step] = {"AdamW": adamw, "LAMB": lamb, "SGD": sgd, "LARS": lars, "Muon": muon}
