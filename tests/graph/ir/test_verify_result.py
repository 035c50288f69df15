"""What self-checks report: one line each, and several as the one closest to its bound."""

import pytest

from girih.graph.ir.verify_result import VerifyResult, verify_report, worst_of
from girih.kernels.base.errors import BundleError

GOOD = VerifyResult("tiles", "tile a", 1e-6, 1e-5, 0.25)
CLOSE = VerifyResult("tiles", "tile b", 9e-6, 1e-5, 0.5)
BAD = VerifyResult("tiles", "tile c", 2e-3, 1e-5, 0.25, "result x")


def test_a_line_each():
    skipped = VerifyResult("tiles", "", skipped="needs avx512")
    assert verify_report([GOOD, BAD, skipped]).splitlines() == [
        "tiles verified: tile a; worst difference 1.0e-06, allowed 1.0e-05 (0.25 s)",
        "tiles FAILED: tile c; worst difference 2.0e-03, allowed 1.0e-05 (0.25 s); "
        "first difference: result x",
        "tiles not verified: needs avx512",
    ]


def test_several_are_the_one_closest_to_its_bound_with_the_seconds_of_all():
    coarse = VerifyResult("tiles", "tile d", 1e-3, 1e-2)
    worst = worst_of("tiles", "3 tiles", [GOOD, CLOSE, coarse])
    assert worst == VerifyResult("tiles", "3 tiles", 9e-6, 1e-5, 0.75)
    later = VerifyResult("tiles", "tile e", 5e-3, 1e-5, 0.25, "result y")
    assert worst_of("tiles", "all", [CLOSE, BAD, later]).first_difference == "result x"
    assert worst_of("passes", "0 passes", []).passed


def test_a_failure_is_raised_with_its_text_and_what_to_do():
    assert GOOD.require(BundleError, "remove it") is GOOD
    with pytest.raises(BundleError, match=r"FAILED: tile c; .*: result x\. Remove it$"):
        BAD.require(BundleError, "Remove it")
