"""The short form of the soak in `support_soak.py`."""

import pytest
from support_soak import soak_fake


def test_mixed_traffic_with_clients_that_leave():
    report, code = soak_fake(4)
    assert report.wrong == []
    assert code == 0
    assert report.preemptions > 0
    assert report.finished > 20
    assert report.left > 5


@pytest.mark.slow
def test_mixed_traffic_through_two_api_processes():
    report, code = soak_fake(30, serve={"log_requests": False, "api_processes": 2})
    assert report.wrong == []
    assert code == 0
