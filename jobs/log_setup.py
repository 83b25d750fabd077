"""What the ranks say on the terminal."""

import logging
import sys
import traceback
import warnings
from typing import Any

from tqdm import tqdm

from errors import without_secrets


def hide_secrets(record: logging.LogRecord) -> bool:
    """Credentials in URLs are in no log."""
    record.msg, record.args = without_secrets(record.getMessage()), ()
    return True


def print_without_secrets(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    print(without_secrets(text), end="", file=sys.stderr)


class AboveBars(logging.StreamHandler):
    """Says a line above the progress bars that stand on the terminal, and not in the middle of one."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)


def start_logging(is_first: bool) -> None:
    """One line a message from rank 0; other ranks speak of warnings and errors only."""
    logging.basicConfig(handlers=[AboveBars()], format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    for handler in logging.getLogger().handlers:
        handler.addFilter(hide_secrets)
    sys.excepthook = print_without_secrets
    logging.getLogger().setLevel(logging.INFO if is_first else logging.WARNING)
    # Said by every rank, known, and nothing to be done about: gloo has no all-to-all, a mesh of two axes is
    # reduced one axis after the other, and nobody writes into what FSDP's modules return.
    for name in ("_redistribute", "_collective_utils"):
        logging.getLogger(f"torch.distributed.tensor.{name}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    warnings.filterwarnings("ignore", message=".*all_gather_tensor_autograd.* is deprecated")
