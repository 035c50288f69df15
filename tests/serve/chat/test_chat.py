"""`girih chat`: session, settings, both backends, interrupts, and the prompt."""

import contextlib
import io
import json
import os
import re
import signal
import threading
import types

import pytest
import support_tokenizer
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from support_serving import fake_engine

from girih.kernels.base.errors import EngineError, RequestError
from girih.serve.chat import terminal
from girih.serve.chat.backends import LocalBackend, Piece, RemoteBackend
from girih.serve.chat.conversation import Conversation
from girih.serve.chat.session import ChatSession
from girih.serve.chat.settings import Settings
from girih.serve.chat.view import View, printable
from girih.serve.cli import main as cli
from girih.serve.config import SamplingConfig
from girih.serve.offline.llm import LLM


class EchoBackend:
    """Answers with what it was asked; remembers what it saw."""

    title = "echo"
    continues = False
    may_be_interrupted = True

    def __init__(self):
        self.seen = []
        self.error = None

    def answer(self, messages, settings):
        self.seen.append([dict(message) for message in messages])
        if self.error:
            raise self.error
        yield Piece("you said ", 2)
        yield Piece(messages[-1]["content"], 1, finish_reason="stop")


class Talk:
    def __init__(self, backend=None, terminal=True, **sampling):
        self.backend = backend or EchoBackend()
        self.screen = io.StringIO()
        console = Console(file=self.screen, force_terminal=terminal, no_color=True, soft_wrap=True)
        self.view = View(console)
        self.session = ChatSession(self.backend, self.view, Settings(SamplingConfig(**sampling)))

    def say(self, *lines):
        start = self.screen.tell()
        for line in lines:
            self.session.handle(line)
        return self.screen.getvalue()[start:]

    @property
    def contents(self):
        return [message["content"] for message in self.session.conversation.messages()]


def test_turns_are_remembered_and_cleared():
    talk = Talk()
    assert "you said one" in talk.say("/system be kind", "one", "two")
    assert talk.contents == ["be kind", "one", "you said one", "two", "you said two"]
    talk.say("/clear")
    assert talk.contents == ["be kind"]
    assert "be kind" in talk.say("/system")


def test_figures_are_shown_after_an_answer():
    assert "3 tokens" in Talk().say("hi")


def test_retry_asks_the_last_question_again():
    talk = Talk()
    assert "nothing to answer" in talk.say("/retry")
    talk.say("one", "two", "/retry")
    assert talk.contents == ["one", "you said one", "two", "you said two"]
    assert talk.backend.seen[-1] == talk.backend.seen[-2]


def test_a_failed_answer_leaves_no_trace():
    talk = Talk()
    talk.backend.error = EngineError("broken")
    assert "broken" in talk.say("one")
    assert talk.contents == []
    talk.backend.error = None
    talk.say("two")
    assert talk.contents == ["two", "you said two"]
    talk.backend.error = EngineError("broken")
    assert "broken" in talk.say("/retry")
    assert talk.contents == ["two", "you said two"]


def test_conversations_are_saved_and_loaded(tmp_path):
    talk = Talk()
    file = tmp_path / "talk ü.json"
    talk.say("/system s", "héllo", f"/save {file}")
    other = Talk()
    assert "2 messages" in other.say(f"/load {file}")
    assert other.contents == talk.contents == ["s", "héllo", "you said héllo"]
    file.write_text(json.dumps([{"role": "user", "content": "x"}]))
    other.say(f"/load {file}")
    assert other.contents == ["x"]


@pytest.mark.parametrize("content", ["{", "{}", '[{"role": "robot", "content": "x"}]', "[1]"])
def test_files_that_are_no_conversation(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(RequestError, match=r"x\.json"):
        Conversation.load(str(file))


def test_mistakes_are_shown(tmp_path):
    talk = Talk()
    assert "unknown command /hepl" in talk.say("/hepl")
    assert "name of a file" in talk.say("/save")
    assert "cannot be written" in talk.say(f"/save {tmp_path}/no/x")
    assert "cannot be read" in talk.say("/load /nowhere")
    assert talk.contents == []


def test_help_lists_every_command():
    talk = Talk()
    shown = talk.say("/help")
    assert all(command.usage in shown for command in talk.session.commands.values())


def test_settings_are_read_by_type():
    settings = Settings(SamplingConfig(temperature=0.5))
    for word in ("top_k=7", "ignore_eos=true", "stop=\\n\\n", "temperature=null", "seed = 3"):
        settings.set(word)
    assert settings.changed() == {"top_k": 7, "ignore_eos": True, "stop": ["\n\n"], "seed": 3}
    for word in ("top_k=x", "top_k=1.5", "ignore_eos=maybe", "temp=1", "temperature"):
        with pytest.raises(RequestError):
            settings.set(word)


def test_escapes_in_settings_leave_other_characters_alone():
    settings = Settings(SamplingConfig())
    for text, stop in {"é€🐝\\n": "é€🐝\n", "\\t": "\t", "a": "a", "\\u00e9": "é"}.items():
        settings.set(f"stop={text}")
        assert settings.changed() == {"stop": [stop]}
    for text in ("\\x", "\\ud83d", "\ud83d", "\\"):
        with pytest.raises(RequestError, match="not valid Unicode"):
            settings.set(f"stop={text}")
    assert settings.changed() == {"stop": ["é"]}


def test_a_value_that_is_not_allowed_is_told_at_once():
    talk = Talk()
    for word in ("temperature=nan", "temperature=-1", "top_p=inf", "seed=" + "9" * 5000):
        assert f"{word.partition('=')[0]} is" in talk.say(f"/set {word}")
    assert "model's defaults" in talk.say("/set")


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_no_text_ends_a_chat(tmp_path, kind, llm, shared_server, connect):
    talk = Talk(LocalBackend(llm) if kind == "local" else connect(shared_server.url), max_tokens=2)
    file = tmp_path / "x.json"
    for line in ("half \ud83d", "\udcff"):
        assert re.search("not valid Unicode|cannot be sent as JSON", talk.say(line))
        assert talk.contents == []
    assert "system: kind" in talk.say("/system \ud83dkind", f"/save {file}", "/system", "Hi")
    for content in (b"[" * 100_000, b"\xff", b'"\\ud83d"'):
        (tmp_path / "y.json").write_bytes(content)
        assert "y.json" in talk.say(f"/load {tmp_path}/y.json")
    assert "0 messages" in talk.say(f"/load {file}")
    assert talk.contents == ["\ud83dkind"]
    assert "2 tokens" in talk.say("/system kind", "Hi")


def test_set_shows_and_changes():
    talk = Talk()
    assert "model's defaults" in talk.say("/set")
    assert "temperature=0.7, top_k=3" in talk.say("/set temperature=0.7 top_k=3")
    assert "must be a number" in talk.say("/set temperature=hot")


def test_answers_cannot_steer_the_terminal():
    assert printable("a\x1b[31mb\x07\tc\nd\x9b") == "a[31mb\tc\nd"


def test_thoughts_come_apart_from_the_answer():
    class Thinker(EchoBackend):
        def answer(self, messages, settings):
            yield Piece("hmm", is_thought=True)
            yield Piece("yes", 1, finish_reason="length")

    talk = Talk(Thinker(), max_tokens=4)
    shown = talk.say("?")
    assert "hmm" in shown.split("\n\nyes\n")[0]
    assert "cut off (max_tokens=4)" in shown
    assert talk.contents == ["?", "yes"]


@pytest.fixture
def llm():
    tokenizer = support_tokenizer.byte_level()
    return LLM.from_engine(fake_engine(tokenizer), tokenizer)


def test_a_local_engine_answers_as_the_library_does(llm):
    talk = Talk(LocalBackend(llm), temperature=0.0, max_tokens=6)
    talk.say("Hello")
    from girih.runtime.records.sampling_params import SamplingParams

    messages = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=6))
    assert talk.contents == ["Hello", output.outputs[0].text]


def bare_tokenizer():
    tokenizer = support_tokenizer.byte_level()
    tokenizer.chat_templates = {}
    return tokenizer


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_model_without_a_chat_template_writes_one_text_on(kind, new_server, connect):
    tokenizer = bare_tokenizer()
    bare = LLM.from_engine(fake_engine(tokenizer), tokenizer)
    if kind == "local":
        backend = LocalBackend(bare)
    else:
        backend = connect(new_server(tokenizer=bare_tokenizer()).url)
    talk = Talk(backend, temperature=0.0)
    from girih.runtime.records.sampling_params import SamplingParams

    def written(prompt, max_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return bare.generate(prompt, params)[0].outputs[0].text

    text = "  one "
    assert "cut off (max_tokens=128)" in talk.say("", "  one ")
    text += written(text, 128)
    assert talk.contents == ["  one ", text.removeprefix("  one ")]
    shown = talk.say("/set max_tokens=3", "", "/retry", "and")
    for piece in ("", "and"):
        text += piece
        text += written(text, 3)
    assert "".join(talk.contents) == text
    assert "3 tokens" in shown
    assert "no system message" in talk.say("/system be kind")
    before = talk.contents
    assert "no room" in talk.say("word " * 300)
    assert talk.contents == before
    assert "nothing to answer" in talk.say("/clear", "/retry", "")
    assert talk.contents == []


def test_a_model_that_only_continues_says_so_at_the_start(capsys, monkeypatch, new_server):
    url = new_server(tokenizer=bare_tokenizer()).url
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert cli.main(["chat", f"url={url}", "temperature=0", "max_tokens=4", "-q"]) == 0
    shown = capsys.readouterr()
    assert "has no chat template" in shown.err
    assert "template" not in shown.out
    assert shown.out.strip()
    assert cli.main(["chat", f"url={url}", "system=Be kind", "-q"]) == 1
    assert "no system message" in capsys.readouterr().err


def test_a_model_that_embeds_is_refused_at_the_start(new_server, connect):
    handle = fake_engine(support_tokenizer.byte_level(), embeds=True)
    embedder = LLM.from_engine(handle, support_tokenizer.byte_level())
    with pytest.raises(RequestError, match="does not generate; it embeds: use /v1/embeddings"):
        LocalBackend(embedder)
    url = new_server(embeds=True).url
    for name in (None, "fake"):
        with pytest.raises(RequestError, match="does not generate; it embeds"):
            RemoteBackend(url, name)
    assert not connect(url, "another").continues  # it is not listed: nothing is known of it


def test_a_full_context_is_an_error_that_is_shown(llm):
    talk = Talk(LocalBackend(llm), max_tokens=3)
    assert "no room" in talk.say("word " * 300)
    assert talk.contents == []


def test_a_server_answers_the_same(shared_server, llm, connect):
    local = Talk(LocalBackend(llm), temperature=0.0, max_tokens=6)
    remote = Talk(connect(shared_server.url + "/v1"), temperature=0.0, max_tokens=6)
    local.say("Hello", "And then?")
    shown = remote.say("Hello", "And then?")
    assert remote.contents == local.contents
    assert "6 tokens" in shown
    assert "max_tokens is 0" in remote.say("/set max_tokens=0", "again")


def test_a_server_that_is_not_there_or_refuses(new_server, connect):
    with pytest.raises(EngineError, match="no server answers"):
        RemoteBackend("http://127.0.0.1:9")
    guarded = new_server(serve={"api_keys": ("k",)})
    with pytest.raises(EngineError, match="API key"):
        RemoteBackend(guarded.url)
    talk = Talk(connect(guarded.url, api_key="k"), max_tokens=2)
    assert "2 tokens" in talk.say("hi")


@pytest.fixture
def connect():
    """Makes backends that are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(
            contextlib.closing(RemoteBackend(*args, **options))
        )


def interrupt_when(condition):
    def wait():
        for _ in range(1000):
            if condition():
                os.kill(os.getpid(), signal.SIGINT)
                return
            threading.Event().wait(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_ctrl_c_stops_the_answer_only(kind, new_server, connect):
    tokenizer = support_tokenizer.byte_level()
    if kind == "local":
        handle = fake_engine(tokenizer, step_seconds=0.01)
        backend = LocalBackend(LLM.from_engine(handle, tokenizer))
        core = handle.core
    else:
        server = new_server(step_seconds=0.01)
        backend, core = connect(server.url), server.core
    talk = Talk(backend, max_tokens=200, ignore_eos=True)
    thread = interrupt_when(lambda: len(talk.screen.getvalue()) > 20)
    shown = talk.say("Hello")
    thread.join()
    assert "stopped" in shown
    question, answer = talk.contents
    assert (question, answer.strip() != "") == ("Hello", True)
    if kind == "local":
        assert not core.has_work()
        core.check_integrity()
    else:
        server.wait_idle()
    assert "3 tokens" in talk.say("/set max_tokens=3", "Again")
    assert len(talk.contents) == 4


def test_a_pipe_gives_the_answers_alone(capsys, monkeypatch, shared_server, connect):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\n/set max_tokens=2\nAgain\n/quit\nno\n"))
    assert cli.main(["chat", f"url={shared_server.url}", "temperature=0", "max_tokens=4"]) == 0
    out = capsys.readouterr().out
    talk = Talk(connect(shared_server.url), temperature=0.0, max_tokens=4)
    talk.say("Hello", "/set max_tokens=2", "Again")
    assert out == "".join(f"{talk.contents[i]}\n" for i in (1, 3))


def test_an_engine_in_this_process_is_built_from_the_settings(capsys, monkeypatch, llm):
    configs = []

    def from_config(config, progress):
        configs.append(config)
        return llm

    monkeypatch.setattr(LLM, "from_config", from_config)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert cli.main(["chat", "model=a/b", "opt=O0", "max_tokens=4", "system=Be kind", "-q"]) == 0
    assert capsys.readouterr().out.strip()
    assert (configs[0].model.source, configs[0].opt.level) == ("a/b", "O0")


def test_a_wrong_value_is_told_before_the_work(capsys):
    assert cli.main(["chat", "temperature=-1"]) == 1
    assert "temperature" in capsys.readouterr().err


def test_keys_of_the_prompt(monkeypatch):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
    talk = Talk()
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("one\x1b\rtwo\r")  # Esc Enter is a new line
        keys.send_text("ab\x03")  # Ctrl-C clears the line
        keys.send_text("three\r")
        keys.send_text("/quit\r")
        terminal.talk(talk.session, talk.view)
    assert talk.contents == ["one\ntwo", "you said one\ntwo", "three", "you said three"]
    assert talk.session.is_over


def test_ctrl_d_leaves(monkeypatch):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
    talk = Talk()
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("\x04")
        terminal.talk(talk.session, talk.view)
    assert talk.contents == []


def test_completion_of_commands_settings_and_files(tmp_path):
    (tmp_path / "talk.json").write_text("[]")
    completer = terminal.CommandCompleter(Talk().session)

    def complete(line):
        found = completer.get_completions(Document(line), CompleteEvent())
        return [completion.text for completion in found]

    assert complete("/s") == ["/system", "/set", "/save"]
    assert complete("/set top_k=3 temp") == ["temperature="]
    assert complete(f"/load {tmp_path}/ta") == ["lk.json"]
    assert complete("hello /s") == []
