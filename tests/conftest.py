"""Where the tests compute: on every device that is there, or with `--device` on one.

Before torch starts: its waiting threads must not spin, which slows everything down where a core is shared.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator
from functools import partial

import pytest
import torch

DEVICES = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=[*DEVICES],
                     help="where equivalence is tested; default: the CPU, and a CUDA GPU if there is one")  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--device")
        there = [chosen] if chosen else [device for device, present in DEVICES.items() if present and device != "mps"]
        metafunc.parametrize("device", there, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device on which all tensors and random generators of a test are made."""
    if request.param != "cpu":  # which is the default anyway, and faster unasked
        monkeypatch.setattr(torch, "Generator", partial(torch.Generator, device=request.param))
        torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)
