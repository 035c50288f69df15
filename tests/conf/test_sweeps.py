"""Words of a sweep to its points."""

import pytest

from girih.conf.sweeps import sweep_points
from girih.kernels.base.errors import ConfigError


def test_every_combination_is_a_point():
    points = sweep_points(["opt=O0,O1", "rounds=1", "workloads=single,batch8"])
    assert points == [
        ["opt=O0", "rounds=1", "workloads=single"],
        ["opt=O0", "rounds=1", "workloads=batch8"],
        ["opt=O1", "rounds=1", "workloads=single"],
        ["opt=O1", "rounds=1", "workloads=batch8"],
    ]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("opt=glob(O*)", ["O0", "O1", "O2", "O3"]),
        ("opt=glob([O0*,O3*])", ["O0", "O3"]),
        ("max_num_seqs=range(1,4)", ["1", "2", "3"]),
        ("max_num_seqs=choice(1,8)", ["1", "8"]),
        ("opt.passes.pack_linears=true,false", ["true", "false"]),
        ("workloads=[single,batch8]", ["[single,batch8]"]),
        ("model=/a/b,c", ["/a/b", "c"]),
        ("model=/a/b", ["/a/b"]),
        ("workload_file='a,b'", ["'a,b'"]),
    ],
)
def test_hydras_grammar(word, values):
    key = word.partition("=")[0]
    assert sweep_points([word]) == [[f"{key}={v}"] for v in values]


@pytest.mark.parametrize(
    ("word", "told"), [("opt=glob(X*)", "matches none of O0"), ("a=range(1,", "cannot read")]
)
def test_mistakes(word, told):
    with pytest.raises(ConfigError, match=told):
        sweep_points([word])
