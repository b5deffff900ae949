"""Fixtures around `small_plans`."""
from __future__ import annotations

from collections.abc import Callable

import pytest
from small_plans import CPU, H200, build_model, build_plan

from costmodel.cluster import Device
from costmodel.model import Model
from costmodel.plan import Plan


@pytest.fixture
def make_model() -> Callable[..., Model]:
    return build_model


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    return build_plan


@pytest.fixture
def h200() -> Device:
    return H200


@pytest.fixture
def core() -> Device:
    return CPU
