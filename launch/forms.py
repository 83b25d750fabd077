"""The forms that lie beside this file: texts with %%name where a value goes."""

import string
from pathlib import Path
from typing import Any


class Form(string.Template):
    """bash and Slurm have their own uses for $ and for a single %."""

    delimiter = "%%"


def filled(form: str, **values: Any) -> str:
    """The form of that name, with every value in its place."""
    text = Path(__file__).with_name(form).read_text()
    return Form(text).substitute(values)
