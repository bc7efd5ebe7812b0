#!/usr/bin/env bash
# The tests that need a GPU, and what saves and loads of a model on a GPU cost. It needs one GPU and takes some minutes:
#
#   pip install ".[test]" && tests/gpu/run.sh
#
# PYTHON names another interpreter. Without a GPU it says so and succeeds. A test that fails is shown, the measurement
# runs all the same, and the exit status is that of the tests.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "torch is not installed or finds no GPU: nothing was tested"
  exit 0
fi
"$python" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)'
# Other releases of torch and transformers than those of CI warn of what they will change.
warnings=(-W ignore::DeprecationWarning -W ignore::FutureWarning -W ignore::UserWarning)
mapfile -t files < <(grep -rlE 'mark\.gpu' tests --include='test_*.py')
status=0
"$python" -m pytest -q -m gpu "${warnings[@]}" "${files[@]}" || status=$?
"$python" -m tests.gpu.measure
exit "$status"
