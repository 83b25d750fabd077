"""A name for jobs/replica_state.py. Both are removed together."""

from typing import Any

RunState = Any
