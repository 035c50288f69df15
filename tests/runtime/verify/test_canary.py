"""The canary: recorded once per set of weights, checked at each start, strict with wrong code."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from support_models import opt_o2, tiny_model, tiny_traced

from girih.graph.execute.executable import Executable
from girih.graph.files.sources import resolve_source
from girih.graph.ir.tile_file import write_tile
from girih.graph.tiles.inductor import eager_tile
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.kernels.base.errors import BundleError
from girih.kernels.base.target import Target, detect_isa
from girih.passes.build.build import lower_and_partition
from girih.runtime.verify.canary import PROMPT_TOKENS, verify_canary

VOCAB, BLOCK = 424, 16


@dataclasses.dataclass
class FakeBundle:
    """What the canary reads of a bundle."""

    path: Path
    layout: object


@functools.cache
def program():
    target = Target("cpu", detect_isa(), 2, "g++")
    return lower_and_partition(tiny_traced("llama"), opt_o2(), target)[1]


def weights(seed=0):
    with open_checkpoint(resolve_source(str(tiny_model("llama", seed)))) as checkpoint:
        return load_weights(program().weights, checkpoint, program().constants, detect_isa())


def executable(tensors, spoil=None):
    """Bound eager tiles; `spoil` alters the results of one tile."""
    tiles = {key: eager_tile(tile.graph) for key, tile in program().tiles.items()}
    if spoil:
        key = list(tiles)[1]
        right = tiles[key]
        tiles[key] = lambda inputs: [spoil(value) for value in right(inputs)]
    return Executable(program().layout, tiles, tensors, 5, BLOCK, torch.float32, "reference")


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / "tiles").mkdir()
    for key, tile in program().tiles.items():
        write_tile(tile.graph, tmp_path / "tiles" / f"{key}.json")
    return FakeBundle(tmp_path, program().layout)


def check(bundle, tensors, spoil=None):
    result = verify_canary(executable(tensors, spoil), bundle, tensors, VOCAB)
    return result.as_text()


def records(bundle):
    return sorted((bundle.path / "canary").glob("*.json"))


def test_the_first_start_records_and_the_next_compare(bundle):
    assert "as eager code, recorded" in check(bundle, weights())
    [record] = records(bundle)
    content = json.loads(record.read_text())
    assert len(content["next_ids"]) == len(content["logprobs"]) == PROMPT_TOKENS
    assert len(set(content["next_ids"])) > 1
    assert "log-probabilities of 12 tokens as recorded; worst difference 0.0e+00" in check(
        bundle, weights()
    )
    assert records(bundle) == [record]


def test_other_weights_have_a_record_of_their_own(bundle):
    check(bundle, weights())
    assert "as eager code" in check(bundle, weights(seed=1))
    assert len(records(bundle)) == 2
    assert "as recorded" in check(bundle, weights())


@pytest.mark.parametrize("recorded", [False, True])
def test_wrong_code_never_becomes_ready(bundle, recorded):
    if recorded:
        check(bundle, weights())
    with pytest.raises(
        BundleError, match=r"canary FAILED: .*first difference: after token \d+ .* expected \d+"
    ):
        check(bundle, weights(), spoil=lambda value: value * 1.05)


def test_not_a_number_is_noticed(bundle):
    check(bundle, weights())
    with pytest.raises(BundleError, match="log-probability nan"):
        check(bundle, weights(), spoil=lambda value: value * torch.nan)


def test_a_damaged_record_is_made_again(bundle):
    check(bundle, weights())
    [record] = records(bundle)
    record.write_text("{")
    assert "as eager code, recorded" in check(bundle, weights())


def test_a_bundle_that_cannot_be_written_is_checked_all_the_same(bundle):
    (bundle.path / "canary").write_text("a file where the directory should be")
    assert "as eager code, not recorded" in check(bundle, weights())
