"""The delay gate: holds prompts back briefly so that more of them share a prefill. Pure.

The router asks once per lane and decision, a worker without a router once per `schedule()`. Asking once per admitted
request would be wrong: the first admission of a burst would shut the gate on the rest. Times are durations of one
machine's monotonic clock.
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
        """True if waiting prompts may be released now.

        Args:
            age_s: age of the oldest waiting prompt, seconds.
            last_prompt_latency_s: duration of the worker's last step with prompt tokens, seconds.
            decoding: True if the worker decodes anything. An idle worker gains nothing from waiting.
            waiting_at_worker: True if prompts already wait at the worker.
        """
        if self.delay_factor <= 0 or not (decoding or waiting_at_worker):
            return True
        return age_s > self._hold_s(last_prompt_latency_s)

    def opens_in(
        self, *, age_s: float, last_prompt_latency_s: float, decoding: bool, waiting_at_worker: bool = False
    ) -> float:
        """Seconds until the gate opens by age alone; 0 if it is open, otherwise more than 0."""
        open_now = self.is_open(
            age_s=age_s,
            last_prompt_latency_s=last_prompt_latency_s,
            decoding=decoding,
            waiting_at_worker=waiting_at_worker,
        )
        return 0.0 if open_now else self._hold_s(last_prompt_latency_s) - age_s + _AFTER_S

    def _hold_s(self, last_prompt_latency_s: float) -> float:
        return min(self.delay_factor * last_prompt_latency_s, self.max_hold_s)
