"""The bytes and seconds of local steps, by formula and by the ledgers of virtual ranks."""

import json

import numpy as np
import pytest

from distopt import Parameter, simulate_local
from distopt.cli import main
from distopt.lab import Question, advise, buckets, exchanges, forecast, mode, modes, network, sendings
from distopt.optim import SGD

SHAPES = [("a", (70, 40)), ("b", (300,)), ("c", (64, 64)), ("d", (10,))]


def ledger_of(name, ranks, threshold):
    """The ledger of a window, and the bytes of the step that sends most."""
    chosen = mode(name)
    every, fragments = chosen.windows.every, chosen.windows.fragments
    params = [Parameter(n, np.zeros(shape, np.float32)) for n, shape in SHAPES]
    sim = simulate_local(
        *(ranks, SGD(0.1)), every=every, fragments=fragments, compressor=chosen.compressor, threshold=threshold
    )
    sent = [0]
    for step in range(every):
        rng = np.random.default_rng(step)
        sim(lambda rank, rng=rng: [(p, rng.normal(size=p.data.shape).astype(np.float32)) for p in params])
        sent.append(sim.ledger.total_of_steps()["sent"])
    return sim.ledger.total_of_steps(), max(np.diff(sent))


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(
    ("name", "threshold"),
    [
        ("local=4", 1000),
        ("local=10+half", 2097152),
        ("local=5+int8", 1000),
        ("local=3+topk=0.02+packed:2bit", 0),
        ("local=7+chunks=4/64", 2097152),
        ("local=6/3", 0),
        ("local=5/4+int4", 0),
    ],
)
def test_forecasts_are_the_ledgers_of_a_window(name, threshold, ranks):
    found, peak = ledger_of(name, ranks, threshold)
    wanted = forecast(buckets(SHAPES, threshold), mode(name), ranks)
    every = mode(name).windows.every
    if "topk" in name:  # where entries are is data
        assert wanted.sent * every == pytest.approx(found["sent"], rel=0.1)
        return
    assert (wanted.payload * every, wanted.sent * every) == pytest.approx((found["payload"], found["sent"]))
    assert wanted.peak == peak


def test_steps_share_the_seconds_of_an_exchange():
    gradients = buckets([("weight", (1000, 1000))])
    question = Question(gradients, 8, network("1GbE"), backward=0.01)
    once, local = question.predict(mode("int8")), question.predict(mode("local=20+int8"))
    assert local.wire == pytest.approx(once.wire / 20)
    assert local.exchange - 0.01 == pytest.approx((once.exchange - 0.01) / 20)


def test_fragments_part_the_buckets():
    there = buckets(SHAPES, 1000)
    apart = exchanges(there, mode("local=8/3"))
    names = [name for those in apart for bucket in those for name in bucket.names]
    assert names == [name for bucket in there for name in bucket.names]
    assert len(apart) == 2  # the middle of no tensor lies in the second third
    window = sum(sending.elements for sending in sendings(there, mode("local=8/3"), 4))
    assert window == sum(bucket.extent for those in apart for bucket in those)


def test_modes_with_local_steps_have_kinds_and_densities():
    chosen = mode("local=50+topk=0.016+packed:2bit")
    assert (chosen.kind, chosen.density) == ("local=50+topk+packed:2bit", 0.016)
    assert chosen.at_density(0.5).name == "local=50+topk=0.5+packed:2bit"
    assert mode("local=30+chunks").kind == "local=30+chunks/4096"
    assert mode("local=30+chunks").at_density(0.5).name == "local=30+chunks=2048/4096"
    assert [m.windows.every for m in modes("dense,local=10,local=50/5+half")] == [1, 10, 50]


MISTAKES = {
    "local": "there is no mode 'local'",
    "local=": "mode local must be with a number of steps",
    "local=1.5": "mode local must be with a number of steps",
    "local=0": "every must be at least 1",
    "local=4/5+half": "fragments must be at most every=4",
    "local=4+local=4": "mode local must be with another mode after it",
    "local=4+toppk": "there is no mode 'toppk'",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    with pytest.raises(ValueError, match=MISTAKES[name]):
        mode(name)


def test_the_advice_knows_windows():
    advice = advise(buckets([("weight", (1000, 1000))]), 8, network("1GbE"), "local=50,half", measure=None)
    assert advice.best.name == "local=50"
    assert "local=50" in str(advice)


def test_the_command_shows_windows(tmp_path, capsys):
    out = tmp_path / "volume.json"
    names = "dense,local=50/5,local=30+chunks+packed:2bit"
    assert main(["volume", "--modes", names, "--ranks", "2,32", "--no-measure", "--json", str(out)]) == 0
    assert "peak step" in capsys.readouterr().out
    rows = {(r["mode"], r["ranks"]): r for r in json.loads(out.read_text())["rows"]}
    dense, local = rows["dense", 32], rows["local=50/5", 32]
    assert dense["peak"] == dense["sent"]
    assert dense["sent"] / local["sent"] == pytest.approx(50, rel=0.01)
    assert local["peak"] < 0.35 * dense["sent"]
    for ranks in (2, 32):
        per_window = 30 * rows["local=30+chunks+packed:2bit", ranks]["sent"]
        assert rows["dense", ranks]["sent"] / per_window >= 190
