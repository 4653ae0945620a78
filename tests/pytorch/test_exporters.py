"""Numbers of a training, read back by the tools that they are for."""

import functools

import numpy as np
import pytest

import distopt
from distopt.comm import Metered
from distopt.monitor import Prometheus, TensorBoard, totals

pytestmark = pytest.mark.torch


def trained(comm, callback):
    """Three steps, of which one is skipped; the callback has the totals after each, and they are returned."""
    comm, w, seen = Metered(comm), distopt.Parameter("w", np.zeros(4, np.float32)), []
    opt = distopt.DistOpt(distopt.optim.SGD(0.1), comm, nonfinite="skip")
    for gradient in (1.0, np.nan, 2.0):
        opt([(w, np.full(4, gradient * (comm.rank + 1), np.float32))])
        seen.append(totals(opt))
        callback(opt.step_counter, seen[-1])
    return seen


def test_prometheus_reads_the_last_numbers(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is missing: pip install it")
    job = 'a "job"\\\n'
    found = distopt.run_ranks(
        2, lambda c: trained(c, Prometheus(tmp_path / f"{c.rank}.prom", rank=str(c.rank), job=job))
    )
    for rank, seen in enumerate(found):
        families = list(parser.text_string_to_metric_families((tmp_path / f"{rank}.prom").read_text()))
        assert {family.type for family in families} == {"gauge"}
        samples = {s.name: s for family in families for s in family.samples}
        numbers = {name.removeprefix("distopt_"): s.value for name, s in samples.items()}
        assert numbers == {"step": 2} | seen[-1]
        assert all(s.labels == {"rank": str(rank), "job": job} for s in samples.values())
    assert seen[-1]["updates"] == 2
    assert seen[-1]["skipped"] == 1
    assert seen[-1]["payload"] == 32, "two sums of four float32, as the ranks refuse the other one by vote"


def test_open_telemetry_has_a_gauge_for_each_number():
    metrics = pytest.importorskip("opentelemetry.sdk.metrics", reason="opentelemetry-sdk is missing: pip install it")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    meter = metrics.MeterProvider([reader]).get_meter("distopt")
    gauge = functools.cache(meter.create_gauge)

    def callback(step, numbers):
        for name, number in numbers.items():
            gauge(f"distopt.{name}").set(number, {"rank": 0})

    (seen,) = distopt.run_ranks(1, lambda comm: trained(comm, callback))
    ((scope,),) = [of.scope_metrics for of in reader.get_metrics_data().resource_metrics]
    points = {metric.name.removeprefix("distopt."): metric.data.data_points for metric in scope.metrics}
    assert {name: point.value for name, (point,) in points.items()} == seen[-1]


def test_tensorboard_has_a_curve_for_each_number(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is missing: pip install tensorboard")
    pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        (seen,) = distopt.run_ranks(1, lambda comm: trained(comm, TensorBoard(writer)))
    events = EventAccumulator(str(tmp_path)).Reload()
    for name in seen[-1]:
        assert [(e.step, e.value) for e in events.Scalars(name)] == [
            (numbers["updates"], numbers[name]) for numbers in seen
        ]
