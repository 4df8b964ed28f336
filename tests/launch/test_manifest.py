"""The Kubernetes manifest starts a command line that exists."""

from __future__ import annotations

from typing import Any

import yaml

from tests.program import ROOT
from utils.cli import parse


def test_manifest_starts_an_existing_script_and_recipe() -> None:
    text = (ROOT / "scripts" / "kubernetes" / "pytorchjob.yaml").read_text(encoding="utf-8")
    replicas: dict[str, Any] = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1, "the operator allows one"
    for pods in replicas.values():
        (container,) = pods["template"]["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator looks for this name"
        script, *words = container["args"]
        assert (container["command"], (ROOT / script).is_file()) == (["torchrun"], True)
        command = parse(words, script)
        assert command.cfg is not None
        assert (ROOT / command.cfg).is_file()
        assert command.flags["MODEL.RESUME"][0] == "auto", "or a restarted pod is refused its own run folder"
        assert command.flags["OUTPUT"][0].startswith("/runs")
