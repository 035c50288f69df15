"""Soaks a server: mixed traffic for a while, then everything is checked.

    python tests/support/support_soak.py --seconds 600         SmolLM2, in float32
    python tests/support/support_soak.py --seconds 30 --fake   a fake model

Clients come with short and long prompts, shared prefixes, priorities and output lengths, a real
model's also with schemas, expressions and choices; three in ten leave in the middle of their
answer. The KV cache is small enough that requests are preempted. At the end: every answer has the
tokens of the same request alone (of those that were left, the first tokens), nothing but 200 came,
no block is in use, requests were preempted, and neither the core nor the server has grown by more
than 2 % after the first minute.

A real model answers each distinct request alone afterwards, its prefix cache emptied before: so
many distinct prompts come that this takes about half as long as the traffic.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import support_tokenizer
from support_core import make_request
from support_fake_runner import fake_generate

Body = dict[str, Any]

HERE = Path(__file__).parent
NUM_CLIENTS = 24
LEAVING_SHARE = 0.3
MAX_MODEL_LEN = 256
ALLOWED_GROWTH = 1.02
SECONDS_TO_SETTLE = 60
SHARED = [[3 * k + i for i in range(48)] for k in range(4)]
FORMS = (
    {"choice": ["red", "green", "blue"]},
    {"regex": "[a-z]{3,20}( [0-9]{1,6}){1,4}"},
    {
        "json": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "count": {"type": "integer", "minimum": 0, "maximum": 9999},
                "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
            },
            "required": ["name", "count", "tags"],
            "additionalProperties": False,
        }
    },
)
"""Forms of the output; all of them end by themselves."""

FORM_SHARE = 0.25
LENGTHS = (1, 5, 30, 90)
SECONDS_PER_PROMPT = 8  # of traffic; each takes a real model a few seconds alone
ADMIN_KEY = "soak"


@dataclass
class Report:
    """What a soak saw.

    Attributes:
        finished: answers that came to their end.
        left: answers whose client went away.
        wrong: what was not as it must be, in words.
        structured: answers of a form, of both kinds.
        tokens: of all answers.
        preemptions: how often a request lost its blocks.
        rss_mib: memory of the core and of the server over time, in MiB, with the seconds.
    """

    finished: int = 0
    left: int = 0
    structured: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    preemptions: int = 0
    rss_mib: list[tuple[float, float, float]] = field(default_factory=list)

    def check_memory(self) -> None:
        """Note growth after the first minute."""
        settled = [sample for sample in self.rss_mib if sample[0] >= SECONDS_TO_SETTLE]
        for index, name in ((1, "the core"), (2, "the server")):
            first, last = settled[0][index], settled[-1][index]
            if last > first * ALLOWED_GROWTH:
                self.wrong.append(f"{name} grew from {first:.1f} to {last:.1f} MiB")

    def memory_line(self) -> str:
        """Memory at the start, after a minute and at the end."""
        settled = next((s for s in self.rss_mib if s[0] >= SECONDS_TO_SETTLE), self.rss_mib[0])
        picked = (self.rss_mib[0], settled, self.rss_mib[-1])
        texts = [
            f"{name} {', '.join(f'{sample[index]:.1f}' for sample in picked)}"
            for index, name in ((1, "core"), (2, "server"))
        ]
        return f"MiB at the start, after a minute, at the end: {'; '.join(texts)}"


class Server:
    """A server process, ready when made.

    Args:
        words: its command line.
    """

    def __init__(self, words: list[str]) -> None:
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " is ready at " in line, line
        self.url = line.split(" at ")[1].split()[0]

    def rss_mib(self) -> tuple[float, float]:
        """Resident memory of the engine's process and of the server's."""
        return _rss_mib(self._core_pid()), _rss_mib(self.process.pid)

    def _core_pid(self) -> int:
        for file in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in file.read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == "girih-core":
                    return int(pid)
        raise AssertionError("the server has no core")

    def stop(self) -> int:
        """Drain and end; returns the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


@dataclass(frozen=True)
class Mix:
    """What clients ask for.

    Attributes:
        vocab_size: prompts have ids below this.
        form_share: share of requests whose output has a form.
        num_prompts: distinct prompts; None makes a new one for every request.
        seed: of the traffic.
    """

    vocab_size: int
    form_share: float = 0.0
    num_prompts: int | None = None
    seed: int = 0


class Soak:
    """Traffic against one server.

    Args:
        server: the server.
        seconds: how long clients come.
        expected: gives the tokens of a request alone.
        mix: of requests.
    """

    def __init__(
        self, server: Server, seconds: float, expected: Callable[[Body], list[int]], mix: Mix
    ) -> None:
        self._server = server
        self._seconds = seconds
        self._expected = expected
        self._mix = mix
        self._draw = random.Random(mix.seed)
        self._prompts = [self._prompt() for _ in range(mix.num_prompts or 0)]
        self._answers: list[tuple[Body, list[int], bool]] = []
        self.report = Report()

    async def run(self) -> Report:
        """Send traffic, wait until the server is idle, check."""
        self._started = time.monotonic()
        self._deadline = self._started + self._seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._server.url, limits=limits, timeout=120
        ) as client:
            sampler = asyncio.create_task(self._sample_memory())
            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_CLIENTS):
                    group.create_task(self._client(client))
            sampler.cancel()
            await self._check_idle(client)
        if self._seconds >= SECONDS_TO_SETTLE:
            self.report.check_memory()
        self._check_answers()
        return self.report

    async def _client(self, client: httpx.AsyncClient) -> None:
        while time.monotonic() < self._deadline:
            body = self._body()
            leaves = self._draw.random() < LEAVING_SHARE
            stop_after = self._draw.randrange(1, body["max_tokens"] + 1) if leaves else None
            try:
                await self._request(client, body, stop_after)
            except httpx.HTTPError as error:
                self.report.wrong.append(f"{type(error).__name__}: {error}")

    def _prompt(self) -> list[int]:
        draw = self._draw
        own = [draw.randrange(5, self._mix.vocab_size) for _ in range(draw.choice([1, 4, 40, 100]))]
        return draw.choice(SHARED)[: draw.choice([0, 16, 48])] + own

    def _body(self) -> Body:
        draw = self._draw
        has_form = draw.random() < self._mix.form_share
        form = {"structured_outputs": draw.choice(FORMS)} if has_form else {"ignore_eos": True}
        return {
            "prompt": draw.choice(self._prompts) if self._prompts else self._prompt(),
            "max_tokens": draw.choice(LENGTHS),
            "temperature": 0,
            **form,
            "priority": draw.randrange(3),
            "stream": True,
            "return_token_ids": True,
        }

    async def _request(self, client: httpx.AsyncClient, body: Body, stop_after: int | None) -> None:
        tokens: list[int] = []
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode()
                self.report.wrong.append(f"status {answer.status_code}: {text[:200]}")
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.report.wrong.append(f"error event: {event['error']['message'][:200]}")
                    return
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                if stop_after is not None and len(tokens) >= stop_after:
                    self.report.left += 1
                    break
            else:
                stop_after = None  # it ended before its client left
        self.report.finished += stop_after is None
        self.report.structured += "structured_outputs" in body
        self.report.tokens += len(tokens)
        self._answers.append((body, tokens, stop_after is None))

    def _check_answers(self) -> None:
        """Hold every answer against the same request alone."""
        for body, tokens, is_whole in self._answers:
            expected = self._expected(body)
            if tokens != (expected if is_whole else expected[: len(tokens)]):
                self.report.wrong.append(
                    f"{len(body['prompt'])} prompt tokens, max_tokens {body['max_tokens']}, "
                    f"{body.get('structured_outputs', 'free')}: other tokens than alone "
                    f"({len(tokens)} of {len(expected)})"
                )

    async def _sample_memory(self) -> None:
        while True:
            seconds = time.monotonic() - self._started
            self.report.rss_mib.append((seconds, *self._server.rss_mib()))
            await asyncio.sleep(max(0.2, self._seconds / 100))

    async def _check_idle(self, client: httpx.AsyncClient) -> None:
        for _ in range(200):
            stats = (await client.get("/status")).json()["engine"]
            if not stats["num_running"] and not stats["num_waiting"]:
                break
            await asyncio.sleep(0.05)
        cache = stats["kv_cache"]
        if cache["num_free_blocks"] != cache["num_blocks"]:
            self.report.wrong.append(f"blocks leaked: {cache}")
        self.report.preemptions = stats["num_preemptions"]


@contextlib.contextmanager
def running(words: list[str]) -> Iterator[Server]:
    """A server that ends whatever happens; stop it before to see its exit code."""
    server = Server(words)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def soak_fake(seconds: float, **options: Any) -> tuple[Report, int]:
    """Soak a fake model in a core's process; returns the report and the server's exit code."""
    tokenizer = support_tokenizer.byte_level()
    vocab_size = tokenizer.vocab_size

    def expected(body: Body) -> list[int]:
        request = make_request("a", body["prompt"], max_tokens=body["max_tokens"])
        return fake_generate(request, vocab_size, MAX_MODEL_LEN)

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(tokenizer._backend.to_str())
        job = {
            "vocab_size": vocab_size,
            "model_path": folder,
            "num_blocks": 60,
            "max_num_seqs": 12,
            "max_num_batched_tokens": 96,
            "policy": "priority",
            "serve": {"log_requests": False},
            **options,
        }
        words = [sys.executable, str(HERE / "support_fake_server.py"), json.dumps(job)]
        with running(words) as server:
            report = asyncio.run(Soak(server, seconds, expected, Mix(vocab_size)).run())
            return report, server.stop()


@contextlib.contextmanager
def serving_model(model: str, words: list[str]) -> Iterator[Server]:
    """Serve a real model on a free port."""
    settings = [f"model={model}", "port=0", "serve.log_requests=false"]
    command = [sys.executable, "-m", "girih.serve.cli.main", "serve", *settings, *words]
    with running(command) as server:
        yield server


class Alone:
    """Tokens that a server gives for a request alone, each distinct one computed once.

    A free request's answer begins every longer one's, so only the longest is asked for.

    Args:
        server: idle when first asked.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: dict[str, list[int]] = {}

    def __call__(self, body: Body) -> list[int]:
        """The tokens of `body`."""
        form = body.get("structured_outputs")
        length = body["max_tokens"] if form else max(LENGTHS)
        key = json.dumps([body["prompt"], length, form])
        if key not in self._known:
            self._known[key] = self._ask({**body, "stream": False, "max_tokens": length})
        tokens = self._known[key]
        return tokens if form else tokens[: body["max_tokens"]]

    def _ask(self, body: Body) -> list[int]:
        if not self._known:  # what was computed among others is not to be used
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            url = f"{self._server.url}/admin/reset_prefix_cache"
            httpx.post(url, headers=headers).raise_for_status()
        answer = httpx.post(f"{self._server.url}/v1/completions", json=body, timeout=120)
        answer.raise_for_status()
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens


def soak_model(
    model: str, seconds: float, words: list[str], num_prompts: int | None = None
) -> tuple[Report, int]:
    """Soak a real model; returns the report and the server's exit code."""
    num_prompts = num_prompts or max(4, int(seconds / SECONDS_PER_PROMPT))
    settings = [
        f"max_model_len={MAX_MODEL_LEN}",
        "num_blocks=24",
        "max_num_seqs=12",
        "scheduler.policy=priority",
        "dtype=float32",  # in bfloat16 near ties fall otherwise in another batch
        f"serve.admin_key={ADMIN_KEY}",
    ]
    with serving_model(model, [*settings, *words]) as server:
        mix = Mix(1000, FORM_SHARE, num_prompts)
        report = asyncio.run(Soak(server, seconds, Alone(server), mix).run())
        return report, server.stop()


def main() -> int:
    """Soak as the command line says; the exit code is 0 when nothing was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--fake", action="store_true", help="a fake model instead")
    parser.add_argument("--prompts", type=int, help="distinct prompts for a real model")
    parser.add_argument("words", nargs="*", help="settings of `girih serve`, key=value")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is not left behind
    if asked.fake:
        report, code = soak_fake(asked.seconds)
    else:
        report, code = soak_model(asked.model, asked.seconds, asked.words, asked.prompts)
    if not report.preemptions:
        report.wrong.append("no request was preempted: the KV cache is too large")
    print(
        f"{report.finished} finished, {report.left} left early, {report.structured} of them of a "
        f"form, {report.tokens} tokens, {report.preemptions} preemptions, exit code {code}, "
        f"{len(report.wrong)} wrong\n{report.memory_line()}"
    )
    for line in dict.fromkeys(report.wrong):
        print(f"  {line}")
    return 1 if report.wrong or code else 0


if __name__ == "__main__":
    sys.exit(main())
