"""Mask functions of transformers, read instead of built."""

import pytest
import torch
from transformers import masking_utils as hf

from girih.graph.adapt.mask_request import Mask, MaskRequests, read_mask
from girih.kernels.base.errors import TraceError

ZERO = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "mask"),
    [
        (hf.causal_mask_function, Mask(causal=True)),
        (hf.bidirectional_mask_function, Mask()),
        (hf.sliding_window_causal_mask_function(8), Mask(causal=True, window=8)),
        (hf.chunked_causal_mask_function(4, ZERO), Mask(causal=True, chunk=4)),
        (hf.sliding_window_bidirectional_mask_function(3), Mask(window=4)),
        (
            hf.and_masks(
                hf.remap_positions_for_packed_sequence(hf.causal_mask_function, ZERO[None]),
                hf.packed_sequence_mask_function(ZERO[None]),
            ),
            Mask(causal=True),
        ),
        (
            hf.or_masks(hf.causal_mask_function, lambda *args: torch.tensor(True)),
            Mask(),
        ),
    ],
)
def test_read(function, mask):
    assert read_mask(function) == mask


@pytest.mark.parametrize(("mask", "window"), [(Mask(window=4), 3), (Mask(True, 8), 8)])
def test_windows_mean_what_transformers_builds(mask, window):
    make = (
        hf.sliding_window_causal_mask_function
        if mask.causal
        else hf.sliding_window_bidirectional_mask_function
    )
    function = make(window)
    for query in range(12):
        for key in range(12):
            seen = bool(function(0, 0, torch.tensor(query), torch.tensor(key)))
            near = abs(query - key) < mask.window
            assert seen == (near and (key <= query or not mask.causal))


def test_unknown_closures_are_refused():
    with pytest.raises(TraceError, match=r"unknown kind \(.*odd_mask"):
        read_mask(odd_mask)
    with pytest.raises(TraceError, match="none of them"):
        read_mask(hf.or_masks(hf.causal_mask_function, hf.chunked_overlay(4, ZERO)))


def odd_mask(batch, head, query, key):
    return (key + query) % 2 == 0


def test_different_masks_have_stand_ins_of_different_shape():
    requests = MaskRequests()
    full = requests.stand_in(Mask(True), "cpu")
    window = requests.stand_in(Mask(True, 8), "cpu")
    again = requests.stand_in(Mask(True), "cpu")
    assert full.shape == again.shape != window.shape
    assert requests.find(window) == Mask(True, 8)
    assert requests.find(full[:, :, :, :1]) is None
