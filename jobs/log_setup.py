"""Log lines of the ranks."""

import logging
import sys
import warnings
from traceback import format_exception

from tqdm import tqdm

from errors import without_secrets


class LogHandler(logging.StreamHandler):
    """Writes lines without credentials, above the progress bars on the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)


def start_logging(is_first: bool) -> None:
    """Log all messages of rank 0, one line each; of other ranks warnings and errors only."""
    logging.basicConfig(handlers=[LogHandler()], format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    sys.excepthook = lambda _, error, __: sys.stderr.write(without_secrets("".join(format_exception(error))))
    logging.getLogger().setLevel(logging.INFO if is_first else logging.WARNING)
    # Known warnings of every rank: gloo has no all-to-all, a mesh of two axes is reduced one axis after the
    # other, and nothing here writes into the output of FSDP's modules.
    for name in ("_redistribute", "_collective_utils"):
        logging.getLogger(f"torch.distributed.tensor.{name}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    warnings.filterwarnings("ignore", message=".*all_gather_tensor_autograd.* is deprecated")
