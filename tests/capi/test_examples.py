"""The examples in C and C++ build against an exported library, and read what the oracle writes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.capi.made import run
from tests.mpi import ROOT

EXAMPLES = Path(ROOT, "examples", "c")
GIVEN = ("--config", "tiny.toml", "--ranks", "4", "--max-tokens", "5")
TOOLS = ("cc", "c++", "cmake", "make", "mpicxx")
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    nvidia = pytest.importorskip("nvidia.cu13")
    site = Path(next(iter(nvidia.__path__))).parent
    folder = tmp_path_factory.mktemp("examples")
    (folder / "tiny.toml").write_text("hidden = 64\nexperts = 9\ntop_k = 3\n")
    export = ("-m", "ep.export", "--arch", "sm_90a", "--no-sharing", "-o", "ep")
    run(sys.executable, *export, *GIVEN, cwd=folder)
    run(sys.executable, EXAMPLES / "vectors.py", *GIVEN, "-o", "vectors", cwd=folder)
    places = (
        f"-DEP_DIR={folder}/ep",
        f"-DCUDA_DIR={site}/cu13",
        f"-DNVSHMEM_DIR={site}/nvshmem",
    )
    run("cmake", "-S", EXAMPLES, "-B", folder, *places)
    run("cmake", "--build", folder)
    return folder


@pytest.mark.parametrize("name", ["08_peer_memory", "09_mpi_nvshmem"])
def test_they_build_and_want_vectors(built, name):
    done = subprocess.run([built / name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{name} VECTORS" in done.stderr


CHECKER = """
#include "vectors.h"
int main(void) {
  int read = 0, wrong = 0;
  for (int rank = 0; rank < EP_RANKS; rank++) {
    vectors_step step;
    for (int number = 0; vectors_read("vectors", number, rank, &step); number++, read++) {
      step.rows_source[0] ^= TOUCH_SOURCE;
      uint16_t* result = (uint16_t*)malloc(EP_MAX_TOKENS * EP_HIDDEN * 2);
      memcpy(result, step.result, (size_t)step.tokens * EP_HIDDEN * 2);
      if (step.tokens) result[step.tokens * EP_HIDDEN - 1] ^= TOUCH_RESULT;
      wrong += vectors_wrong_result(&step, result);
      free(result);
      int32_t* source = (int32_t*)calloc(EP_ROWS * 4, 4);
      for (int row = 0; row < EP_ROWS; row++) source[row * 4] = step.rows_source[row];
      source[0] ^= TOUCH_SOURCE;
      uint8_t* x = step.rows_x;
      for (int row = 0; row < EP_ROWS; row++) {
        if (step.rows_source[row] < 0) x[row * EP_HIDDEN] |= TOUCH_EMPTY;
      }
      wrong += vectors_wrong_rows(&step, x, step.rows_scales, step.rows_ids, step.rows_weights,
                                  source, 4);
      free(source);
      vectors_free(&step);
    }
  }
  printf("%d %d\\n", read, wrong);
  return 0;
}
"""


@pytest.mark.parametrize("touched", ["", "SOURCE", "RESULT", "EMPTY"])
def test_vectors_are_read_as_they_were_written(built, touched):
    source = built / "checker.c"
    source.write_text(CHECKER)
    kinds = {"SOURCE": 1, "RESULT": 1, "EMPTY": 0x7F}
    flags = [f"-DTOUCH_{name}={kinds[name] * (name == touched)}" for name in kinds]
    include = (f"-I{built}/ep", f"-I{EXAMPLES}")
    program = built / "checker"
    run("cc", "-std=c11", "-Wall", "-Wextra", *flags, *include, source, "-o", program)
    read, wrong = map(int, run(program, cwd=built, env=os.environ).split())
    assert read == 6 * 4
    assert (wrong > 0) == bool(touched)
