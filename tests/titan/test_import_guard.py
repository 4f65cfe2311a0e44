"""The import of torchtitan: lazy, of a supported version, with an existing device type, its own logger, no graphs."""

import subprocess
import sys
from importlib import metadata

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import titan_moe.titan as titan
from titan_moe.titan import import_guard

pytestmark = pytest.mark.slow


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_titan_import_loads_neither_torch_nor_torchtitan():
    code = "import sys, titan_moe.titan; print([n for n in ('torch', 'torchtitan') if n in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_torchtitan_first_import_sets_logger_and_device_only():
    code = """
import logging, sys, torch, torch._utils
compile = torch.compile
before = torch._utils._get_available_device_type, torch._utils._get_device_module, dir(torch.cpu)
logging.basicConfig(level="INFO")
from titan_moe.titan import CheckpointManager, GarbageCollection, import_torchtitan
GarbageCollection.collect("a message that torchtitan would log")
assert before == (torch._utils._get_available_device_type, torch._utils._get_device_module, dir(torch.cpu))
device_type = import_torchtitan("tools.utils").device_type
assert device_type == (torch._utils._get_available_device_type() or "cpu"), device_type
assert CheckpointManager.__init__.__globals__["logger"].name == "torchtitan"
logging.getLogger("torchtitan").setLevel("INFO")
GarbageCollection.collect("wanted message")
import titan_moe.training.trainer
assert torch.compile is compile and "torch._inductor.compile_fx" not in sys.modules, "Inductor takes long to import"
"""
    assert run_python(code).splitlines()[0].startswith("INFO:torchtitan:[GC] wanted message")


@pytest.mark.filterwarnings("error:.*lru_cache")
def test_functions_of_torchtitan_are_compiled_at_their_first_call():
    own, outer = CompileCounter(), CompileCounter()
    with import_guard._compiled_at_first_call():
        double = torch.compile(lambda x: 2 * x, backend=own)
    inlined = torch.compile(lambda x: double(x) + 1, backend=outer, fullgraph=True)
    assert inlined(torch.ones(3)).tolist() == [3] * 3 and (own.frame_count, outer.frame_count) == (0, 1)
    for _ in range(2):
        assert double(torch.ones(2)).tolist() == [2, 2] and own.frame_count == 1


def test_titan_names_are_callable():
    for name in titan.__all__:
        assert callable(getattr(titan, name)), name


def test_titan_unknown_name_error_lists_all_names():
    with pytest.raises(AttributeError, match="'Trainer'; it has CheckpointManager"):
        titan.Trainer  # noqa: B018


@pytest.mark.parametrize("version", ["0.2.2", "0.2.3.dev1+cpu", "0.2.10"])
def test_torchtitan_supported_versions(version, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    import_guard.check_version()


@pytest.mark.parametrize("version", ["0.2.1", "0.1.0", "0.3.0", "1.0"])
def test_torchtitan_unsupported_versions_are_refused(version, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(
        ImportError, match=f"torchtitan {version} is installed; .* pip install 'torchtitan>=0.2.2,<0.3'"
    ):
        import_guard.check_version()


def test_torchtitan_missing_error_names_the_command(monkeypatch):
    def missing(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ImportError, match="not installed; .* pip install"):
        import_guard.check_version()


def test_torchtitan_missing_dependency_is_named():
    code = """
import sys
sys.modules["triton"] = None
from titan_moe.titan import import_torchtitan
try:
    import_torchtitan()
except ImportError as error:
    print("triton" in str(error) and "pip install" in str(error))
"""
    assert run_python(code).splitlines()[0] == "True"
