"""Devices and process groups."""
import torch

from runtime import mesh


def test_a_cuda_device_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert mesh.indexed(torch.device("cuda")) == torch.device("cuda", 3)
    assert mesh.indexed(torch.device("cuda", 1)) == torch.device("cuda", 1) and mesh.indexed(torch.device("cpu")) == torch.device("cpu")
