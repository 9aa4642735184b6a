"""How a winner is chosen: one strategy a file, found by name, and pins."""

from __future__ import annotations

from ...errors import PlanError
from ...schema import StrategyConfig
from .base import ChoiceContext, Decision, Strategy
from .first_wins import FirstWinsStrategy
from .latency_budget import LatencyBudgetStrategy
from .max_throughput import MaxThroughputStrategy
from .min_latency import MinLatencyStrategy
from .one_backend import OneBackendStrategy
from .pareto import ParetoStrategy
from .pins import decide_pin

HighestThroughputStrategy = MaxThroughputStrategy
"""The name under which others know it."""

_STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        MinLatencyStrategy,
        MaxThroughputStrategy,
        LatencyBudgetStrategy,
        OneBackendStrategy,
        FirstWinsStrategy,
        ParetoStrategy,
    )
}

__all__ = [
    "ChoiceContext",
    "Decision",
    "FirstWinsStrategy",
    "HighestThroughputStrategy",
    "LatencyBudgetStrategy",
    "MaxThroughputStrategy",
    "MinLatencyStrategy",
    "OneBackendStrategy",
    "ParetoStrategy",
    "Strategy",
    "decide_pin",
    "strategy_names",
    "strategy_of",
]


def strategy_names() -> list[str]:
    """The names that a plan may use."""
    return list(_STRATEGIES)


def strategy_of(value: Strategy | StrategyConfig | str) -> Strategy:
    """The strategy of a config or a name (`"MinLatency"`, `"MinLatencyStrategy"`); an instance is returned as it is.

    Raises PlanError for a name that isn't known and for unknown, missing or impossible options.
    """
    if isinstance(value, Strategy):
        return value
    config = StrategyConfig(value) if isinstance(value, str) else value
    if not isinstance(config, StrategyConfig):
        raise PlanError(f"strategy must be a Strategy, its config or its name, but got {value!r}")
    name = config.name.removesuffix("Strategy")
    found = _STRATEGIES.get("MaxThroughput" if name == "HighestThroughput" else name)
    if found is None:
        raise PlanError(f"strategy must be one of {strategy_names()}, but got {config.name!r}")
    return found.of_options(dict(config.options))
