"""The delay gate: prompts wait a little so that more of them share a prefill.

The router asks once per lane and decision, a worker without a router once per `schedule()`: never once per admitted
request, or the first admission of a burst shuts the gate on the rest. Times are durations, measured on one
machine by a monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.limits import MAX_HOLD_S

# Added to the waiting time so that a timer set by `opens_in` finds the gate open in spite of rounding.
_AFTER_S = 1e-6


@dataclass(frozen=True)
class DelayGate:
    """Opens when the oldest prompt has waited `delay_factor` prefills, or `max_hold_s`.

    Attributes:
        delay_factor: how many last prefill durations the oldest prompt waits; 0 is off: always open.
        max_hold_s: longest wait. Not optional: at a factor times the prefill share of time >= 1 the hold feeds itself.
    """

    delay_factor: float
    max_hold_s: float = MAX_HOLD_S

    def is_open(
        self, *, age_s: float, last_prompt_latency_s: float, decoding: bool, waiting_at_worker: bool = False
    ) -> bool:
        """True if what waits may go now.

        Args:
            age_s: age of the oldest waiting prompt, seconds.
            last_prompt_latency_s: duration of the worker's last step that computed prompt tokens, seconds.
            decoding: whether the worker decodes anything. An idle one gains nothing from waiting.
            waiting_at_worker: whether prompts wait there already.
        """
        if self.delay_factor <= 0 or not (decoding or waiting_at_worker):
            return True
        return age_s > self._hold_s(last_prompt_latency_s)

    def opens_in(
        self, *, age_s: float, last_prompt_latency_s: float, decoding: bool, waiting_at_worker: bool = False
    ) -> float:
        """Seconds until the gate opens by age alone; 0 when it is open, more than 0 when it is not."""
        open_now = self.is_open(
            age_s=age_s,
            last_prompt_latency_s=last_prompt_latency_s,
            decoding=decoding,
            waiting_at_worker=waiting_at_worker,
        )
        return 0.0 if open_now else self._hold_s(last_prompt_latency_s) - age_s + _AFTER_S

    def _hold_s(self, last_prompt_latency_s: float) -> float:
        return min(self.delay_factor * last_prompt_latency_s, self.max_hold_s)
