"""Periods as a configuration writes them: ["2001-01-01", "2007-12-31"].

Standard library only: the check of a command line imports this module, and answers in under a second.
"""

from datetime import UTC, datetime, timedelta

from errors import refuse


def parse_period(key: str, period: tuple[str, ...]) -> tuple[datetime, datetime] | None:
    """First and last instant of ["first", "last"]; None where there is no period.

    Dates with an offset become UTC; the result carries no offset, as numpy's dates. A last day without an
    hour counts to its end. ConfigError naming `key` for anything else.
    """
    if not period:
        return None
    if len(period) != 2:
        refuse(key, list(period), 'two dates expected, for example ["2001-01-01", "2007-12-31"]')
    first, last = (_parse_date(key, text) for text in period)
    if is_whole_day(period[1]):
        last += timedelta(days=1, seconds=-1)
    if last < first:
        refuse(key, list(period), "the last date lies before the first; exchange them")
    return first, last


def _parse_date(key: str, text: str) -> datetime:
    try:
        date = datetime.fromisoformat(text)
        return date.astimezone(UTC).replace(tzinfo=None) if date.tzinfo else date
    except (ValueError, OverflowError):
        refuse(key, text, "not a date; write 2001-12-31 or 2001-12-31T18:00")


def is_whole_day(text: str) -> bool:
    """Whether a date is written without an hour."""
    return len(text) <= len("2001-01-01")
