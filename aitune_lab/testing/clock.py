"""A clock for tests of timing: scripted calls advance it, so that no test depends on how fast the machine is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable


class ScriptedClock:
    """Seconds that pass only when a scripted call says so.

    Example:
        >>> clock = ScriptedClock(seed=1)
        >>> call = clock.call(latency_ms=2.0, noise=0.0)
        >>> before = clock()
        >>> call()
        >>> round((clock() - before) * 1000, 6)
        2.0

    Args:
        seed: of the noise of all calls.
        drift: factor on every latency at a time in seconds (a machine that warms up or gets busy).
    """

    def __init__(self, seed: int = 0, drift: Callable[[float], float] = lambda seconds: 1.0) -> None:
        self.seconds = 0.0
        self._random = random.Random(seed)
        self._drift = drift

    def __call__(self) -> float:
        return self.seconds

    def advance(self, milliseconds: float) -> None:
        self.seconds += milliseconds / 1e3

    def call(
        self, latency_ms: float, noise: float = 0.03, outlier_share: float = 0.02, outlier_factor: float = 3.0
    ) -> Callable[[], None]:
        """A call that takes `latency_ms`, give or take.

        Args:
            latency_ms: median latency in milliseconds.
            noise: standard deviation of the logarithm of the latency.
            outlier_share: share of calls that take `outlier_factor` times as long.
            outlier_factor: see `outlier_share`.
        """

        def scripted() -> None:
            factor = math.exp(self._random.gauss(0.0, noise)) if noise else 1.0
            if noise and self._random.random() < outlier_share:
                factor *= outlier_factor
            self.advance(latency_ms * factor * self._drift(self.seconds))

        return scripted
