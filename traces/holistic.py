"""What HolisticTraceAnalysis says of a run's newest traces: all ranks side by side, on GPUs.

    .venv/bin/python -m traces.holistic outputs/vit1b

An extra of 90 packages, best in an environment of its own: this program needs no torch. traces.inspect_trace
says more of one rank; this one compares ranks by computation, communication and copies, and says which
kernels and which idle times differ. Exit codes: 0, 2 bad input.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from errors import ConfigError, DataError, one_line_errors
from traces.events import find_traces, read_trace

INSTALL = "python -m venv hta && hta/bin/pip install HolisticTraceAnalysis==0.5.0, then hta/bin/python -m ..."


def analysis_of(where: Path) -> Any:
    """HTA's own object over one trace a rank. ConfigError: it is not installed; DataError: nothing for it."""
    traces = [read_trace(path) for path in find_traces(where)]
    if bare := [trace for trace in traces if not trace.on_gpu]:
        reason = "no kernels of a GPU, without which HolisticTraceAnalysis fails"
        raise DataError(f"{bare[0].path}: {reason}; take traces.inspect_trace")
    try:
        from hta.trace_analysis import TraceAnalysis  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"traces.holistic: needs HolisticTraceAnalysis ({error}): {INSTALL}") from error
    files = {trace.rank: str(trace.path.absolute()) for trace in traces}
    return TraceAnalysis(trace_files=files, trace_dir=str(traces[0].path.parent.absolute()))


def tables(analysis: Any) -> dict[str, Any]:
    """Title -> table of pandas; times in microseconds."""
    kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
    idle = analysis.get_idle_time_breakdown(ranks=sorted(analysis.t.traces), visualize=False)[0]
    return {
        "time of each rank": analysis.get_temporal_breakdown(visualize=False),
        "communication with computation beside it": analysis.get_comm_comp_overlap(visualize=False),
        "idle by cause": idle,
        "kinds of kernels": kinds,
        "kernels": kernels.assign(name=kernels["name"].str[:60]).nlargest(12, "sum (us)"),
    }


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    with one_line_errors():
        if len(argv) != 1 or argv[0].startswith("-"):
            raise ConfigError("traces.holistic: name one run's folder, or one trace")
        logging.disable(logging.WARNING)  # HTA tells what it does
        for title, table in tables(analysis_of(Path(argv[0]))).items():
            print(f"{title}\n{table.to_string(index=False)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
