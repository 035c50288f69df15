"""`girih chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any

from girih.conf.compose import compose_config
from girih.kernels.base.errors import RequestError
from girih.kernels.base.records import to_record
from girih.serve.chat.backends import ChatBackend, LocalBackend, RemoteBackend
from girih.serve.chat.conversation import Conversation
from girih.serve.chat.session import ChatSession
from girih.serve.chat.settings import Settings
from girih.serve.chat.terminal import talk
from girih.serve.chat.view import View
from girih.serve.cli.preflight import engine_of
from girih.serve.cli.verbs import Options
from girih.serve.config import SamplingConfig
from girih.serve.progress import ProgressDisplay
from girih.serve.text.sampling_defaults import SamplingDefaults

CONTINUES = (
    "The model has no chat template: it does not answer, it writes on from where your text ends. "
    "Write how a text begins; an empty line has it go on, /clear starts another text."
)


def run(words: list[str], options: Options) -> int:
    """Talk until the person leaves."""
    config = compose_config("chat", words)
    sampling = to_record(SamplingConfig, config["sampling"])
    SamplingDefaults(server=sampling).build({}, None)  # a wrong value is told before the long work
    conversation = Conversation.load(config["load"]) if config["load"] else Conversation()
    conversation.system = config["system"] or conversation.system
    view = View()
    with closing(_backend(config, options)) as backend:
        view.note(f"{backend.title}. /help lists the commands, Ctrl-C stops an answer.")
        if backend.continues:
            _tell_of_continuing(conversation, view)
        talk(ChatSession(backend, view, Settings(sampling), conversation), view)
    return 0


def _tell_of_continuing(conversation: Conversation, view: View) -> None:
    if conversation.system is not None:
        raise RequestError("the model has no chat template, so it takes no system message")
    if view.is_terminal:
        view.note(CONTINUES)
    else:  # stdout is for the text alone
        print(CONTINUES, file=sys.stderr)


def _backend(config: dict[str, Any], options: Options) -> ChatBackend:
    if config["url"]:
        return RemoteBackend(config["url"], config["url_model"], config["api_key"])
    engine_config = engine_of(config, generates=True)
    from girih.serve.offline.llm import LLM

    with ProgressDisplay(options.quiet) as progress:
        return LocalBackend(LLM.from_config(engine_config, progress))
