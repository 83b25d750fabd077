"""Attacks the program from outside, as a stranger would, and counts what it answers.

    .venv/bin/python benchmarks/attack.py [--kind data] [--cases 60] [--seed 0] [--jobs 2]

Kinds: schema (command lines, environments, files that are no configuration), combinations (settings that
cannot work together, sizes that nothing holds), data (archives that are damaged, mislabelled or odd),
identity (weights that would mean something else), files (of a run's folder, cut short or forged), faults
(full disks, signals, killed processes). A case is right when bad input ends in one line and exit code 2, a
fault in one line or nothing worse, and what can be understood runs to the right end; no byte of a run's
folder changes where nothing was to be written.

silent: accepted, or a wrong result, without a word. other: an answer, but several lines, or with another exit
code. Needs no GPU. Ends with 1 when anything is not as it should be, and names it.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import attack_data, attack_faults, attack_files, attack_layouts, attack_run, attack_schema
from benchmarks.attack_case import BAD, VERDICTS, Answer, Case, Ended, Runner, Runners, attempt
from benchmarks.attack_stage import Stage, build
from benchmarks.results_file import record

KINDS: dict[str, Callable[[Stage, random.Random], Iterator[Case]]] = {
    attack_schema.KIND: attack_schema.cases,
    attack_layouts.KIND: attack_layouts.cases,
    attack_data.KIND: attack_data.cases,
    attack_run.KIND: attack_run.cases,
    attack_files.KIND: attack_files.cases,
    attack_faults.KIND: attack_faults.cases,
}
TAIL = 600  # characters of an output that are shown


@dataclass
class Result:
    case: Case
    answer: Answer
    ended: Ended

    @property
    def lines(self) -> str:
        """What is wrong, with which command, and the end of what it said."""
        verdict, why = self.answer
        tail = (self.ended.stdout + self.ended.stderr)[-TAIL:].strip()
        return f"WRONG, {verdict}: {self.case.kind}, {self.case.name}: {why}\n  {self.case.shown}\n  | " + (
            "\n  | ".join(tail.splitlines())
        )


def drawn(options: argparse.Namespace, stage: Stage) -> list[Case]:
    """All cases of the kinds asked for, or some of them."""
    rng = random.Random(options.seed)
    kinds = [options.kind] if options.kind else list(KINDS)
    found = [case for kind in kinds for case in KINDS[kind](stage, rng)]
    found = [case for case in found if options.named in case.name]
    return rng.sample(found, min(options.cases, len(found))) if options.cases else found


def attack(cases: list[Case], scratch: Path, jobs: int) -> list[Result]:
    """Each case once, several at a time, in the order given."""
    runners, began = Runners(scratch), time.monotonic()

    def one(case: Case) -> Result:
        answer, ended = attempt(case, runners.own)
        if answer[0] in BAD:
            print(
                f"{time.monotonic() - began:6.0f} s  {answer[0]}: {case.kind}, {case.name}: {answer[1]}",
                flush=True,
            )
        return Result(case, answer, ended)

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(one, cases))
    for runner in Runners.made:
        runner.close()
    return results


def table(results: list[Result]) -> str:
    kinds = list(dict.fromkeys(result.case.kind for result in results))
    counts = {kind: Counter(r.answer[0] for r in results if r.case.kind == kind) for kind in kinds}
    counts["all"] = sum(counts.values(), Counter())
    rows = [f"{'kind of case':16}{'cases':>8}" + "".join(f"{verdict:>11}" for verdict in VERDICTS)]
    for kind, found in counts.items():
        rows.append(f"{kind:16}{found.total():>8}" + "".join(f"{found[verdict]:>11}" for verdict in VERDICTS))
    return "\n".join(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--cases", type=int, default=0, help="so many, drawn; 0: all")
    parser.add_argument("--named", default="", help="only those with this text in their names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    return parser.parse_args()


def main() -> int:
    options, began = parse(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rossby-attack-") as text:
        scratch = Path(text)
        runner = Runner(scratch)
        stage = build(scratch, runner)
        runner.close()
        results = attack(drawn(options, stage), scratch, options.jobs)
    seconds = time.monotonic() - began
    wrong = [result for result in results if result.answer[0] in BAD]
    counts = Counter(f"{result.case.kind}: {result.answer[0]}" for result in results)
    names = [f"{result.case.kind}, {result.case.name}: {result.answer}" for result in wrong]
    row = {"cases": len(results), "seed": options.seed, "counts": counts, "wrong": names, "seconds": seconds}
    record("attack", [row | {"kind": options.kind or "all"}])
    for result in wrong:
        print(result.lines)
    print(f"\n{table(results)}\n{seconds:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
