"""The README's tables say what the code does."""

import re
from dataclasses import fields
from pathlib import Path

from test_dapo_trainer import dapo_trainer
from tiny import tiny_trainer

from trainers import SAGCConfig

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_metric_table_names_what_is_logged(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.train()
    logged = {re.sub(r"risk_at_size/\d+", "risk_at_size/{G}", key) for key in trainer.state.log_history[0]}
    # Finish times need colocated vLLM; tests/test_vllm_cpu.py reads these two.
    logged |= {"sagc/stall_seconds", "sagc/rollout_seconds"}
    assert set(re.findall(r"^\| `(sagc/[^`]+)`", README, re.MULTILINE)) == {k for k in logged if k.startswith("sagc/")}


def test_dapo_metric_table_names_what_is_logged(tmp_path: Path) -> None:
    trainer = dapo_trainer(tmp_path, max_steps=1)
    trainer.train()
    text = (Path(__file__).parent.parent / "docs" / "dapo.md").read_text()
    logged = {key for key in trainer.state.log_history[0] if key.startswith("dapo/")}
    assert set(re.findall(r"^\| `(dapo/[^`]+)`", text, re.MULTILINE)) == logged


def test_compatibility_table_names_tests_that_exist() -> None:
    folder = Path(__file__).parent
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", (folder.parent / "docs" / "compatibility.md").read_text())
    assert len({file for file, _ in named}) > 10
    for file, test in named:
        assert f"def {test}" in (folder / file).read_text()


def test_relative_links_lead_somewhere() -> None:
    root = Path(__file__).parent.parent
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_parameter_table_has_the_defaults() -> None:
    defaults = {field.name: field.default for field in fields(SAGCConfig)}
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([\w.]+)`? ", README, re.MULTILINE))
    for name in ("rho", "tau", "min_group_size", "utility", "forgetting_factor", "change_every", "straggler_event"):
        assert rows[name] == str(defaults[name])
    assert defaults["num_generations"] == 8


def test_first_snippet_is_a_valid_configuration(tmp_path: Path) -> None:
    (call,) = re.findall(r"^args = SAGCConfig\((.*)\)$", README, re.MULTILINE)
    settings = eval(f"dict({call})")
    config = SAGCConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **settings)
    assert config.prompts_per_process == 8
