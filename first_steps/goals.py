"""What a first run can be for. Standard library only: the options of jobs.begin name them."""

GOALS = {
    "try": "minutes, to see it learn",
    "baseline": "a solid model of one step",
    "long": "the same, then a stage of rollouts that holds for days",
}
