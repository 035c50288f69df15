"""Seconds from `girih serve` to its first answer.

    python tests/bench/measure_start.py [--empty] [KEY=VALUE ...]

`--empty` starts from a cache that holds the model's files only. Printed, in seconds after the
launch: every line of the server, when it is ready, and the first answer that is not a 503.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from girih.kernels.base.cache_dir import cache_dir

PORT = 8155
PROMPT = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
LIMIT_SECONDS = 300


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--empty", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    command = [sys.executable, "-m", "girih.serve.cli.main", "serve", f"model={asked.model}"]
    with tempfile.TemporaryDirectory() as empty:
        place = os.environ.copy()
        if asked.empty:
            (Path(empty) / "models").symlink_to(cache_dir() / "models")
            place["GIRIH_CACHE_DIR"] = empty
        started = time.perf_counter()
        server = subprocess.Popen(
            [*command, f"port={PORT}", "serve.log_requests=false", *asked.words],
            env=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=echo, args=(server, started), daemon=True).start()
        try:
            wait_for_an_answer(asked.model, started)
            print(f"{time.perf_counter() - started:6.2f} first answer", flush=True)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def echo(server: subprocess.Popen[str], started: float) -> None:
    """Print what a server says, with the time."""
    assert server.stdout is not None, "a pipe was asked for"
    for line in server.stdout:
        print(f"{time.perf_counter() - started:6.2f} {line.rstrip()[:100]}", flush=True)


def wait_for_an_answer(model: str, started: float) -> None:
    """Ask until it answers, seldom and with one client: the start needs the processor."""
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as client:
        while time.perf_counter() - started < LIMIT_SECONDS:
            try:
                if client.post("/v1/completions", json={"model": model, **PROMPT}).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
    raise TimeoutError(f"no answer after {LIMIT_SECONDS} s")


if __name__ == "__main__":
    main()
