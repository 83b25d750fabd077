"""Every layout gives what one process gives: losses, gradient norms, gradients, weights, predictions.

A fast part of the table in tests/parity.py; benchmarks/layout_parity.py runs all of it.
"""

import pytest

from tests.parity import FAST, TABLE, Outcome, reference_of, three_steps


@pytest.fixture(scope="module")
def references():
    return {}


@pytest.mark.parametrize("name", FAST)
def test_layout(name: str, ranks, references) -> None:
    layout = TABLE[name]
    reference = reference_of(layout)
    if reference not in references:
        references[reference] = ranks(1).run(three_steps, reference)[0]
    outcomes: list[Outcome] = ranks(layout.ranks).run(three_steps, layout)
    assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)  # shown alike by every rank
    errors = outcomes[0].errors(references[reference])
    wrong = {what: error for what, error in errors.items() if error > layout.tolerance(what)}
    assert not wrong, f"{name}: {wrong}"
