"""The packages depend on each other in one direction, and `sagc` alone stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_controller_needs_no_framework() -> None:
    heavy = ["torch", "trl", "transformers", "datasets", "accelerate", "vllm", "wandb", "trainers", "coded"]
    program = f"import sys, sagc; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(("package", "forbidden"), [("sagc", {"trainers", "coded"}), ("coded", {"trainers", "sagc"})])
def test_dependencies_point_one_way(package: str, forbidden: set[str]) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not imported_packages(path) & forbidden, path
