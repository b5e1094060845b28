"""When a loss is a spike: far above what the last steps had.

    spike  <=>  loss > median + k max(1.4826 MAD, 0.01 |median|)

over the losses of the last WINDOW updates, from LEAST of them on. 1.4826 MAD (the median of the
distances from the median) is the standard deviation of normal noise and is not moved by a few
outliers; the floor of 1 % keeps a run that has nearly no noise from seeing spikes everywhere. A
loss that falls, as early in a run, is below its median: no spike.
"""

import statistics
from collections.abc import Sequence

WINDOW, LEAST = 128, 20
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its MAD."""
FLOOR = 0.01


def is_spike(loss: float, recent: Sequence[float], deviations: float) -> bool:
    """Whether `loss` is one after the losses `recent`; false while these are few."""
    if len(recent) < LEAST:
        return False
    middle = statistics.median(recent)
    spread = NORMAL * statistics.median(abs(x - middle) for x in recent)
    return loss > middle + deviations * max(spread, FLOOR * abs(middle))


def remember(recent: tuple[float, ...], loss: float) -> tuple[float, ...]:
    """The last WINDOW losses, this one included."""
    return (*recent, loss)[-WINDOW:]
