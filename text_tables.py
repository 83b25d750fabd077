"""Tables of plain text: one format for each column."""

import re
from collections.abc import Iterable


def text_table(formats: str, rows: Iterable[Iterable[object]]) -> str:
    """Rows under each other. `formats` has a column's format specification each: "<34 >10.2f >9.1%".

    Of text (heads of columns, say) only the alignment and the width count; None is an empty cell.
    """
    columns = formats.split()
    lines = ["".join(map(_cell, row, columns)).rstrip() for row in rows]
    return "\n".join(lines)


def _cell(value: object, specification: str) -> str:
    if isinstance(value, int | float):
        return format(value, specification)
    width = re.match(r"[<>]?\d+", specification.replace("+", ""))
    return format(value or "", width[0] if width else "")
