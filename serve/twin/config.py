"""Settings of a simulation, as frozen records."""

from __future__ import annotations

from dataclasses import dataclass

from girih.kernels.base.choices import check_choices, one_of, require


@dataclass(frozen=True)
class SimulateConfig:
    """Settings of the simulated load and engines.

    Attributes:
        cost: file of `girih simulate fit`: what a step costs, and the engine it was seen on.
        replicas: engines behind one router.
        routing: least_loaded (fewest unfinished requests) or round_robin.
        async_scheduling: engines plan a step ahead, as `runtime.async_scheduling`.
        max_model_len: longest prompt + output in tokens; null takes the measured engine's.
    """

    cost: str | None = None
    replicas: int = 1
    routing: str = one_of("least_loaded", "round_robin")
    async_scheduling: bool = True
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        require(self.replicas >= 1, "simulate.replicas", self.replicas, "at least 1")
        check_choices("simulate", self)
