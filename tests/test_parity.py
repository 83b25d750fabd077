"""Every layout gives what one process gives: losses, gradient norms, gradients, weights, predictions.

A part of the table in tests/parity.py; benchmarks/layout_parity.py runs all of it.
"""

import pytest
import torch

from tests.parity import FAST, SLOW, TABLE, Outcome, reference_of, three_steps
from tests.test_optimizers import check, train


@pytest.fixture(scope="module")
def references():
    return {}


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_layout(name: str, ranks, references) -> None:
    layout = TABLE[name]
    if "zbv" in name and torch.__version__ < ("2.13" if layout.compile else "2.12"):
        pytest.skip("planning/start_checks.py refuses this schedule with an older torch")
    reference = reference_of(layout)
    if reference not in references:
        references[reference] = ranks(1).run(three_steps, reference)[0]
    outcomes: list[Outcome] = ranks(layout.ranks).run(three_steps, layout)
    assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)  # shown alike by every rank
    errors = outcomes[0].errors(references[reference])
    wrong = {what: error for what, error in errors.items() if not error <= layout.tolerance(what)}
    assert not wrong, f"{name}: {wrong}"


OPTIMISERS = [
    ("zero-1 2", "LAMB"),
    ("zero-1 2", "Muon"),
    ("fsdp 2", "LARS"),
    ("hsdp 2 x 2", "LAMB"),
    ("fsdp 2 x tp 2", "LAMB"),
    ("fsdp 2 x tp 2", "Muon"),
    ("pp 2 x fsdp 2", "LAMB"),
]


@pytest.mark.parametrize(("layout", "optimizer"), OPTIMISERS)
def test_optimiser(ranks, layout: str, optimizer: str) -> None:
    """Norms of whole matrices; those of a step in one collective."""
    found = ranks(TABLE[layout].ranks).run(train, TABLE[layout], optimizer)[0]
    check(found, optimizer)
    # Beside them: what moves a gradient that tensor parallelism has cut otherwise than its parameter.
    sums = [calls for call, calls in found["collectives"].items() if call.kind == "all-reduce"]
    assert optimizer == "Muon" or sums == [1], found["collectives"]
