"""What a start says of itself before anything is built."""

from support_models import tiny_model

from girih.runtime.messages import Progress
from girih.runtime.start import start_of
from girih.serve.options import engine_config


def test_the_model_is_announced_and_only_front_ends_learn_where_it_is():
    """`detail` is shown to anybody who asks for /ready."""
    events = []
    start = start_of(engine_config(str(tiny_model("llama")), {"opt": "O0"}), events.append)
    (event,) = [event for event in events if event.stage == "model"]
    assert event.detail == start.spec.name
    assert "/" not in event.detail
    assert event.model_path == str(start.spec.files.path)
    assert Progress.of(event).as_event() == event
