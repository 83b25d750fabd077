"""What models/conditioning.py is told, in numbers: for whoever has to count them without torch."""

from collections.abc import Sequence

# Channels of each: sine and cosine of an angle, or steps since the analysis, which half precisions know, too.
CHANNELS = {"time_of_day": 2, "day_of_year": 2, "lead_time": 1}
HALF_LEADS = (1.0, 4.0, 16.0, 64.0)  # steps at which a feature of the lead is 1/2; it never passes 1
HIDDEN = 64  # width of the layer that features go through


def num_channels(conditions: Sequence[str]) -> int:
    return sum(CHANNELS[name] for name in conditions)


def num_features(conditions: Sequence[str]) -> int:
    return sum(len(HALF_LEADS) if name == "lead_time" else CHANNELS[name] for name in conditions)
