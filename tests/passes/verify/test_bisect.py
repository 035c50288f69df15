"""Bisecting: the first bad prefix is found with few checks, and the two ends are checked."""

import pytest

from girih.kernels.base.errors import PassError
from girih.passes.verify.bisect import first_bad_pass

NAMES = tuple("abcdefghijk")


@pytest.mark.parametrize("at", range(len(NAMES)))
def test_the_first_bad_pass_is_found(at):
    asked = []

    def is_good(first):
        asked.append(first)
        return len(first) <= at

    assert first_bad_pass(NAMES, is_good) == NAMES[at]
    assert len(asked) <= 2 + 4
    assert all(first == NAMES[: len(first)] for first in asked)


@pytest.mark.parametrize("verdict", [True, False])
def test_a_check_that_never_changes_blames_no_pass(verdict):
    words = "holds with all" if verdict else "fails without any pass"
    with pytest.raises(PassError, match=words):
        first_bad_pass(NAMES, lambda first: verdict)
