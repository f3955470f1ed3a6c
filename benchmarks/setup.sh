#!/usr/bin/env bash
# Makes .venv-bench: torch as the project pins it, the competitors at pinned versions, and this checkout.
#
#   benchmarks/setup.sh            create it, or bring it up to date
#   PYTHON=python3.12 benchmarks/setup.sh
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu benchmarks/setup.sh     take torch from this index (CPU build)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv-bench
constraints=benchmarks/constraints.txt
torch_version=$(sed -n 's/^torch==//p' "$constraints")

[ -x "$environment/bin/python" ] || "${PYTHON:-python3}" -m venv "$environment"
python=$environment/bin/python

# torch alone and first, so that no competitor's own wish picks another build of it
"$python" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c "$constraints" "torch==$torch_version"
built=$("$python" -c 'import torch; print(torch.__version__)')
"$python" -m pip install --quiet -c "$constraints" numpy accelerate lightning "setuptools>=68"
"$python" -m pip install --quiet -c "$constraints" --no-build-isolation -e .

after=$("$python" -c 'import torch; print(torch.__version__)')
if [ "$built" != "$after" ]; then
    echo "pip replaced torch $built by $after while installing the competitors; delete $environment and check $constraints." >&2
    exit 1
fi
"$python" -c 'import accelerate, lightning, torch; print("torch", torch.__version__, "| accelerate", accelerate.__version__, "| lightning", lightning.__version__)'
