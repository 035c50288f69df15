import pytest

from girih.runtime.schedule.prefill_budget import LEAST_TOKENS, PrefillBudget

MOST = 1024


def budget_after(seconds, num_steps=40):
    """The budget of an engine whose step of n prompt tokens takes `seconds(n)`."""
    budget = PrefillBudget(100.0)
    for _ in range(5):
        budget.learn(0, 8, seconds(0))
    for _ in range(num_steps):
        num_tokens = budget.tokens(MOST)
        budget.learn(num_tokens, 8, seconds(num_tokens))
    return budget.tokens(MOST)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda n: 0.020 + n * 0.0004, 200),  # 20 ms of answers leave 80 for prompts
        (lambda n: 0.300 + n * 0.002, 150),  # answers alone miss the target: as long again
        (lambda n: 0.010 + n * 1e-6, MOST),
        (lambda n: 0.010 + n * 0.1, LEAST_TOKENS),
    ],
    ids=["rest of the target", "twice the answers", "fast", "slow"],
)
def test_the_budget_settles_where_a_step_takes_its_time(seconds, expected):
    assert budget_after(seconds) == pytest.approx(expected, abs=2)


def test_a_budget_follows_steps_that_get_slower():
    budget = PrefillBudget(100.0)
    budget.learn(0, 8, 0.020)
    for cost, expected in ((0.0004, 200), (0.0016, 50)):
        for _ in range(20):
            num_tokens = budget.tokens(MOST)
            budget.learn(num_tokens, 8, 0.020 + num_tokens * cost)
        assert budget.tokens(MOST) == pytest.approx(expected, abs=2)


def test_little_is_learnt_of_small_prompts_or_of_steps_without_answers():
    budget = PrefillBudget(100.0)
    budget.learn(0, 8, 0.020)
    for _ in range(20):
        num_tokens = budget.tokens(MOST)
        budget.learn(num_tokens, 8, 0.020 + num_tokens * 0.0004)
    known = budget.tokens(MOST)
    budget.learn(known // 4, 8, 5.0)
    budget.learn(known, 0, 5.0)
    budget.learn(known, 8, 0.0)
    assert budget.tokens(MOST) == known


def test_one_slow_step_halves_the_budget_at_most():
    budget = PrefillBudget(100.0)
    budget.learn(0, 8, 0.020)
    for _ in range(20):
        budget.learn(budget.tokens(MOST), 8, 0.020 + budget.tokens(MOST) * 0.0004)
    known = budget.tokens(MOST)
    budget.learn(known, 8, 60.0)
    assert budget.tokens(MOST) >= known // 2 - 1
