"""The engine Ray, here on one machine; the tests that need ray are slow."""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import pytest

from helmscope.runs import Ray, Serial, Unit, UnitsFailed, run_units
from helmscope.store import RunFolder
from helmscope.types import HelmscopeError, MissingExtra
from support.toy_units import die, divide, manifest, mixture, product, results

MANIFEST = manifest()


def test_a_missing_package_is_reported_before_any_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"ray is not installed, and this needs it: pip install 'helmscope\[cluster"):
        Ray(2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 0}, "workers is 0, but it must be a whole number >= 1"),
        ({"workers": 2, "threads": 0}, "threads is 0, but it must be a whole number >= 1"),
        ({"workers": 2, "address": 10001}, "address is 10001, but it must be a str such as 'ray://head:10001' or None"),
    ],
)
def test_bad_input_is_refused(options, sentence):
    with pytest.raises(HelmscopeError) as caught:
        Ray(**options)
    assert str(caught.value) == sentence


@pytest.fixture
def ray():
    """Ray, disconnected before and after each test."""
    import ray

    assert not ray.is_initialized()
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_ray_gives_the_bytes_of_serial_and_is_shut_down(tmp_path, ray):
    units = [*mixture(9), *(Unit(f"product-{i}", product, {"seed": i, "size": 300}) for i in range(3))]
    for name, engine in {"serial": Serial(), "ray": Ray(2)}.items():
        assert len(run_units(units, RunFolder.create(tmp_path / name), manifest=MANIFEST, engine=engine)) == 12
        assert not ray.is_initialized()
    assert results(tmp_path / "serial") == results(tmp_path / "ray")


@pytest.mark.slow
def test_units_that_fail_or_die_are_named_and_a_running_ray_is_left_running(tmp_path, ray):
    path = str(Path(__file__).parents[1])
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([path, *filter(None, sys.path)])}}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    units = [*mixture(3), Unit("bad", divide, {"a": 1, "b": 0}), Unit("die", die)]
    with pytest.raises(UnitsFailed) as caught:
        run_units(units, RunFolder.create(tmp_path / "run"), manifest=MANIFEST, engine=Ray(2))
    assert len(caught.value.result) == 3
    assert caught.value.result.failed["bad"] == "ZeroDivisionError: division by zero"
    assert caught.value.result.failed["die"].startswith("Ray lost it: WorkerCrashedError: The worker died unexpectedly")
    assert ray.is_initialized()
    fast = RunFolder.create(tmp_path / "fast")
    with pytest.raises(UnitsFailed, match="unit 'bad' failed"):
        run_units([units[3], *mixture(3)], fast, manifest=MANIFEST, engine=Ray(1), fail_fast=True)
    assert os.listdir(tmp_path / "fast" / "units") == []
    assert ray.is_initialized()


@pytest.mark.slow
def test_a_cluster_is_joined_by_its_address(tmp_path, ray):
    """Its workers cannot import support.toy_units, like a package that is missing on a cluster: those units fail."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        folder = RunFolder.create(tmp_path / "run")
        units = [Unit("mean", statistics.fmean, {"data": [1.0, 2.0]}), *mixture(1)]
        with pytest.raises(UnitsFailed) as caught:
            run_units(units, folder, manifest=MANIFEST, engine=Ray(2, cluster.address))
        assert caught.value.result["mean"] == 1.5
        assert caught.value.result.failed == {
            "numbers-0": "Ray lost it: ModuleNotFoundError: No module named 'support'"
        }
        assert not ray.is_initialized()
    finally:
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1", "", "nowhere.invalid:1"])
def test_a_wrong_address_is_one_sentence_at_once(tmp_path, address):
    with pytest.raises(HelmscopeError, match=f"^address is '{address}', but no Ray cluster answers there: it must be"):
        run_units(mixture(3), RunFolder.create(tmp_path / "none"), manifest=MANIFEST, engine=Ray(2, address))
