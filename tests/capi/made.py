"""Libraries over the played driver, with what the cases need to know of them."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ep import EpConfig
from ep.bench.c_loop import LOOP, SOURCE
from ep.config import TUNING_FILE
from ep.export.library import build_library, run_compiler
from ep.export.plan import ExportPlan
from ep.export.tables import SOURCES
from ep.kernels.compile import Kind
from ep.kernels.tuning import MEASURED

HERE = Path(__file__).parent
CONFIG = EpConfig(ranks=4, hidden=64, experts=9, top_k=3, max_tokens=20)
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
DRIVER = "libcuda.so.1"
TABLE = """[sm_90a]
[[sm_90a.dispatch]]
up_to = 2
senders = 0.01
[[sm_90a.dispatch]]
up_to = 10
senders = 0.3
receivers = 0.7
[[sm_90a.dispatch]]
up_to = 14
senders = 31
[[sm_90a.combine]]
up_to = 12
reducers = 0.4
[[sm_90a.combine]]
up_to = 16
senders = 0.5
reducers = 31
[sm_90a.measured]
"""


def run(*words, **options):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def table_text(config):
    samples = {str: '"x"', int: "1", bool: "true", float: "1.0", dict: "{}"}
    values = {name: samples[kind] for name, kind in MEASURED.items()}
    values |= {name: str(getattr(config, name)) for name in ("ranks", "hidden", "top_k")}
    return TABLE + "".join(f"{name} = {value}\n" for name, value in values.items())


def make(folder, config=CONFIG):
    """A library of `config` with the table above; its kernels are those of CONFIG."""
    folder.mkdir(exist_ok=True)
    (folder / TUNING_FILE).write_text(table_text(config))
    plan = ExportPlan("gpt_oss_20b", config, ("sm_90a",))
    images = ExportPlan("", CONFIG, ("sm_90a",)).images(lambda _done, _total: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_TUNING", str(folder / TUNING_FILE))
        patch.setenv("CC", " ".join(("cc", *STRICT)))
        build_library(plan, images, folder)
        shutil.copyfile(SOURCE, folder / SOURCE.name)
        run_compiler(folder, SOURCE.name, "-shared", "-o", LOOP)
    named = {}
    for (_, pdl, part), image in zip(plan.kernels(), images, strict=True):
        name = f"{part.kind}{'-norm' * part.norm}-{pdl}"
        digest = hashlib.sha256(image.cubin).hexdigest()
        named[name] = {"threads": image.threads, "size": len(image.cubin), "sha256": digest}
    facts = {
        "config": dataclasses.asdict(config),
        "images": named,
        "params": {Kind.DISPATCH: images[0].params, Kind.COMBINE: images[1].params},
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    return plan, images


def make_driver(folder):
    """The played driver, in a folder where a library is."""
    cc = ("cc", "-std=c11", *STRICT, "-shared", "-fPIC", f"-I{SOURCES}", f"-I{folder}")
    run(*cc, f"-Wl,-soname,{DRIVER}", HERE / "played_cuda.c", "-o", folder / DRIVER)
