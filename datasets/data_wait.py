"""Why the loop waits for data: which stage of reading limits it, and the option that changes it."""

import os
from typing import NamedTuple

from archives.chunks import Done

WORTH_TELLING = 0.05  # of a step's time
BUSY = 0.7  # of their time that readers work, from which on there are too few of them


class Reading(NamedTuple):
    """What a rank's readers did in some seconds."""

    done: Done
    waited: float  # seconds of the loop
    seconds: float
    readers: int  # data.num_workers
    by_threads: bool

    @property
    def is_slow(self) -> bool:
        return self.waited > WORTH_TELLING * self.seconds


def advice(reading: Reading) -> str:
    """One line for a loop that waits."""
    done = reading.done
    share = f"{reading.waited / reading.seconds:.0%} of the time the loop waits for data"
    if not reading.by_threads:
        what = "no threads can read these files side by side"
        return f"{share}: {what}; convert them (python -m datasets.convert), or raise data.num_workers"
    if not reading.readers:
        return f"{share}: it reads them itself; set data.num_workers = 2"
    slower = "reading from the store" if done.reading > done.decoding else "decoding"
    busy = (done.reading + done.decoding) / (reading.readers * reading.seconds)
    fix = "raise data.prefetch_factor"
    if busy > BUSY and slower == "decoding" and reading.readers >= (os.cpu_count() or 1):
        fix = "give a rank more cores, or convert to chunks of one date (python -m datasets.convert)"
    elif busy > BUSY:
        fix = f"raise data.num_workers, now {reading.readers}"
        fix += ", or name a data.disk_cache_path" if slower != "decoding" else ""
    rate = done.bytes / reading.seconds / 1e9
    return f"{share}: {slower} takes most, at {rate:.2f} GB/s decoded; {fix}"
