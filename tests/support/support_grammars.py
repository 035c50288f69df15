"""Grammars of structured output in tests: what a form allows, and rows that hold one."""

from __future__ import annotations

import numpy as np
import torch

from girih.runtime.isolation import RowFailures
from girih.runtime.records.plans import NewRequest, SchedulerOutput
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.sample.mask import unpack_mask
from girih.runtime.structured import backends
from girih.runtime.structured.rows import GrammarRows
from girih.runtime.structured.store import GrammarStore

VOCAB, EOS = 424, 2
NULL = {"type": "null"}


def allowed(matcher):
    mask = np.zeros((1, -(-VOCAB // 32)), np.int32)
    matcher.backend.fill([matcher], [0], mask)
    return set(unpack_mask(torch.from_numpy(mask), VOCAB)[0].nonzero()[:, 0].tolist())


def taken(vocabulary, form, text):
    """Whether a text may begin an output, and whether it may end there."""
    matcher = GrammarStore(lambda: vocabulary).matcher(form)
    is_taken = all(matcher.accept(token) for token in vocabulary.encode(text))
    return is_taken, is_taken and EOS in allowed(matcher)


def written(vocabulary, form):
    """The text of a form that allows one text only (or any of several that are equal)."""
    backend = backends.load(backends.choose(form)).make_backend(vocabulary, 1)
    matcher, text = backend.compile(form).matcher(), b""
    while not matcher.is_stopped:
        token = max(allowed(matcher))
        assert token not in vocabulary.special_ids - {EOS}
        assert matcher.accept(token), (text, matcher.error)
        text += vocabulary.tokens[token] if token != EOS else b""
        assert len(text) < 200
    return text.decode()


def obj(properties, required=None, **more):
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, **more}


def grammar_rows(store):
    return GrammarRows(store, VOCAB, RowFailures())


def accept(rows, ids, tokens):
    """Move matchers on; why requests have failed."""
    rows.accept(ids, torch.tensor(tokens))
    return rows._failures.texts(ids)


def plan(new=(), finished=(), preempted=()):
    return SchedulerOutput(0, tuple(new), (), {}, tuple(finished), tuple(preempted))


def request(request_id, form, output=()):
    params = SamplingParams(structured=form)
    return NewRequest(request_id, [5, 6, *output], 2, params, (EOS,), [1], 0)
