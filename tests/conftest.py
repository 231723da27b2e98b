"""What holds for every test: a seed, torch's global state put back, and no skipped integration test in CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

NO_SKIP = "HEADWISE_NO_SKIP"

# The same examples in every run, and no time limit for one example: machines are shared.
settings.register_profile("headwise", derandomize=True, deadline=None)
settings.load_profile("headwise")


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers already share the cores


@pytest.fixture(autouse=True)
def _torch_state() -> Iterator[None]:
    """Seed torch, and put back what a test may have changed for the whole process, compiled functions included."""
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:  # loading it takes seconds
        torch.compiler.reset()  # it recompiles a function for so many modules and no more, in the whole process
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    # Only where they changed: setting them is slow, the second one loads torch's compiler.
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if deterministic != (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ):
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def pytest_itemcollected(item: pytest.Item) -> None:
    """`thin(n)`: of a grid of parameters, what lies off every n-th diagonal is slow.

    Every value of a parameter still runs by default, if the other parameters have n values or more.
    """
    thin = item.get_closest_marker("thin")
    if thin is not None and sum(_places(item)) % thin.args[0]:
        item.add_marker(pytest.mark.slow)


def _places(item: pytest.Item) -> Iterator[int]:
    """Where the test's values stand in the list of each `parametrize`; `callspec.indices` counts items, not these."""
    for mark in item.iter_markers("parametrize"):
        names, lists = mark.args
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        own = [item.callspec.params[name] for name in names]
        for place, values in enumerate(lists):
            if isinstance(values, type(pytest.param())):
                values = values.values
            elif len(names) == 1:
                values = (values,)
            if all(one is other for one, other in zip(values, own, strict=True)):
                yield place
                break


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items) and not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    # An expected failure is reported as skipped too, and stays one.
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("integration"):
        _refuse_skip(report, item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    # A file that skips as a whole, by importorskip for instance, has no items whose markers could be asked.
    whole_file = report.skipped and isinstance(collector, pytest.Module)
    if whole_file and "mark.integration" in collector.path.read_text("utf-8"):
        _refuse_skip(report, collector.nodeid)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport, nodeid: str) -> None:
    if os.environ.get(NO_SKIP, "") not in ("", "0"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{nodeid} is an integration test, which must not skip while {NO_SKIP} is set. {reason}"
