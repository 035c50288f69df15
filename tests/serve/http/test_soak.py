"""The short form of the soak in `support_soak.py`."""

import pytest
import support_soak
from support_soak import soak_fake


def test_mixed_traffic_with_clients_that_leave():
    for seconds in (4, 12, 36):  # a busy machine needs longer until requests press on the cache
        report, code = soak_fake(seconds)
        assert report.wrong == []
        assert code == 0
        if report.preemptions and report.finished > 20 and report.left > 5:
            return
    raise AssertionError(f"hardly any pressure: {report}")


@pytest.mark.slow
def test_mixed_traffic_through_two_api_processes():
    report, code = soak_fake(30, serve={"log_requests": False, "api_processes": 2})
    assert report.wrong == []
    assert code == 0


def test_a_soak_that_breaks_off_leaves_no_server_behind(monkeypatch):
    made = []

    class Broken(support_soak.Soak):
        async def _client(self, client):
            made.append(self._server.process)
            raise ValueError("broken")

    monkeypatch.setattr(support_soak, "Soak", Broken)
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        soak_fake(1)
    assert made[0].poll() is not None
