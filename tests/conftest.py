"""Where the tests compute: on the CPU and on a CUDA GPU, if there is one, or where `--device` says.

OMP_WAIT_POLICY is set before torch starts, so that its waiting threads don't spin: that slows
everything down where processes share a core.
"""

import os
import shutil
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import pretended_device
from tests.helpers import KINDS, offline_page

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
DEVICES = {
    "cpu": True,
    "cuda": torch.cuda.is_available(),
    "mps": torch.backends.mps.is_available(),
    pretended_device.NAME: True,
}
BY_DEFAULT = ("cpu", "cuda")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SKIPPED: list[str] = []  # tests, and why they were skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=[*DEVICES],
        help="where equivalence is tested; default: the CPU, and a CUDA GPU if there is one; "
        f"{pretended_device.NAME}: a pretended device, which finds tensors left on the CPU",
    )
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="fail if a test is skipped for any reason but a missing GPU",
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        SKIPPED.append(f"{report.nodeid}: {report.longrepr[2]}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:  # a whole file
        SKIPPED.append(f"{report.nodeid}: {report.longrepr[2]}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    refused = [reason for reason in SKIPPED if "GPU" not in reason]
    if session.config.getoption("--no-skips") and refused:
        print("\nskipped, and must not be:", *refused, sep="\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--device")
        there = [chosen] if chosen else [device for device in BY_DEFAULT if DEVICES[device]]
        metafunc.parametrize("device", there, indirect=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a generator is the same in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of model that a method takes: see helpers.of_kind()."""
    return request.param


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device on which all tensors and random generators of a test are made."""
    if request.param == pretended_device.NAME:
        with pretended_device.pretended(monkeypatch):
            yield request.param
    else:
        if request.param != "cpu":  # which is the default anyway, and faster unasked
            there = request.param

            class GeneratorThere(torch.Generator):
                def __new__(cls, device: str = there) -> torch.Generator:
                    return super().__new__(cls, device)

            monkeypatch.setattr(torch, "Generator", GeneratorThere)
            torch.set_default_device(request.param)
        yield request.param
    torch.set_default_device(None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    there = [path for path in map(shutil.which, BROWSERS) if path]
    if not there:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=there[0], args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with offline_page(browser) as page:
        yield page
