r"""Learning rate of each optimizer step.

With the peak P, the floor E = final_fraction * P, S steps numbered from 0, W of them warm-up and
the last N cooldown:

    step < W             P * step / W                              from 0; step W has P exactly
    cosine               E + (P - E) * (1 + cos(pi x)) / 2         x = (step - W) / (S - 1 - W)
    linear               E + (P - E) * (1 - x)                     so step S - 1 has E exactly
    wsd                  P
    step >= S - N        E + (R - E) * (1 - sqrt(y))               y = (step - (S - N)) / (N - 1)

R is what the kind has at step S - N, so the cooldown starts without a jump and step S - 1 has E
exactly. Where one step is first and last of a decay (S - 1 = W, or N = 1) it has E. Only wsd
without a cooldown never falls.

Source   Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5 (cosine); Haegele et al. 2024,
         arXiv:2405.18392, eq. 1 (1 - sqrt cooldown). Written from the equations.
"""

import math

from llmq_nb.config import ScheduleConfig
from llmq_nb.core.errors import UserError


def check_schedule(schedule: ScheduleConfig, total_steps: int) -> None:
    """Raise the UserError of a warm-up and cooldown that do not fit into the run.

    At least one step is left after the warm-up: the peak is reached, the floor too.
    """
    warmup, cooldown = schedule.warmup_steps, schedule.cooldown_steps
    if warmup + max(cooldown, 1) <= total_steps:
        return
    steps = "step" if total_steps == 1 else "steps"
    raise UserError(
        f"warmup_steps = {warmup} and cooldown_steps = {cooldown}"
        f" do not fit into {total_steps} {steps}",
        where="schedule",
        mend="make them shorter or train for more steps",
    )


def learning_rate(schedule: ScheduleConfig, peak: float, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step`, 0 to total_steps - 1; steps outside have the nearest one's.

    Never outside [0, peak]. The schedule has passed `check_schedule`.
    """
    step = min(max(step, 0), total_steps - 1)
    if step < schedule.warmup_steps:
        return peak * (step / schedule.warmup_steps)
    floor = schedule.final_fraction * peak
    start = total_steps - schedule.cooldown_steps
    if step < start:
        return _decayed(schedule, peak, floor, step, total_steps)
    top = _decayed(schedule, peak, floor, start, total_steps)
    return _between(floor, top, 1.0 - math.sqrt(_position(step, start, total_steps - 1)))


def _decayed(
    schedule: ScheduleConfig, peak: float, floor: float, step: int, total_steps: int
) -> float:
    """What the kind alone has at a step after the warm-up."""
    if schedule.kind == "wsd":
        return peak
    x = _position(step, schedule.warmup_steps, total_steps - 1)
    height = 1.0 - x if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * x))
    return _between(floor, peak, height)


def _position(step: int, first: int, last: int) -> float:
    """0 at the first step, 1 at the last, and 1 where they are the same."""
    return (step - first) / (last - first) if last > first else 1.0


def _between(low: float, high: float, height: float) -> float:
    """low at height 0 and high at height 1, both exactly: rounding must not pass the peak."""
    return high if height >= 1.0 else min(high, low + (high - low) * height)
