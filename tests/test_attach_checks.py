"""What `enable` checks before it touches torch: the build of torch, and whether there is a GPU. Needs neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallocator import _gpu, _torch
from rallocator.errors import TorchNotSupportedError
from tests.processes import succeed


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "says"),
    [
        ("2.11.0+cpu", None, None, "built without CUDA"),
        ("2.11.0+rocm7.0", None, "7.0", "built for ROCm"),
        ("2.8.1+cu128", "12.8", None, "older than 2.9"),
        ("1.13.1", "11.7", None, "older than 2.9"),
    ],
)
def test_unsupported_build_of_torch_is_named(version: str, cuda: str | None, hip: str | None, says: str) -> None:
    with pytest.raises(TorchNotSupportedError, match=says) as raised:
        _torch.check_build(version, cuda, hip)
    assert version in str(raised.value)


@pytest.mark.parametrize("version", ["2.9.0", "2.10.1+cu128", "2.15.0a0+git1234567", "3.0.0"])
def test_supported_build_of_torch_is_accepted(version: str) -> None:
    _torch.check_build(version, "12.8", None)


@pytest.mark.parametrize(
    ("visible", "hides"),
    [
        (None, False),
        ("0", False),
        ("3,1", False),
        ("GPU-8932f937", False),
        ("MIG-1", False),
        ("0,-1", False),
        ("", True),
        ("-1", True),
        ("NoDevFiles", True),
        ("-1,0", True),
    ],
)
def test_environment_that_hides_all_gpus_is_seen(visible: str | None, hides: bool) -> None:
    reason = _gpu._hidden_reason(visible)
    assert (reason is not None) == hides


@pytest.mark.parametrize("trace", ["dev/nvidia0", "dev/dxg", "dev/nvhost-gpu", "proc/driver/nvidia/gpus/0000:01:00.0"])
def test_device_is_seen_on_a_server_under_wsl_and_on_jetson(trace: str, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert _gpu._device_reason(tmp_path) is not None
    (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / trace).touch()
    assert _gpu._device_reason(tmp_path) is None


def test_device_on_the_bus_counts_before_it_has_a_node(tmp_path: Path) -> None:
    for name, vendor, kind in [("0", "0x10de", "0x040300"), ("1", "0x8086", "0x030000"), ("2", "0x10de", "0x030200")]:
        assert _gpu._device_reason(tmp_path) is not None
        device = tmp_path / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    assert _gpu._device_reason(tmp_path) is None


def test_unknown_way_to_attach_is_a_value_error() -> None:
    printed = succeed("""
        import rallocator
        try:
            rallocator.enable(attach="brigde")
        except ValueError as error:
            print(error)
    """)
    assert printed == "attach must be one of 'auto', 'pluggable', 'bridge', not 'brigde'"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "OSError: libcudart.so.12: cannot open"),
        ("raise ImportError('numpy is too new\\nand here is a page about it')", "ImportError: numpy is too new)"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("", "AttributeError: module 'torch' has no attribute '__version__'"),
    ],
)
def test_torch_that_fails_on_import_is_one_that_is_not_supported(source: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(source)
    printed = succeed(f"""
        import sys, warnings
        import rallocator
        sys.path.insert(0, {str(tmp_path)!r})
        try:
            rallocator.enable()
        except rallocator.errors.TorchNotSupportedError as error:
            print(error)
            print(type(error.__cause__).__name__)
        sys.modules.pop("torch", None)
        warnings.simplefilter("ignore")
        print(rallocator.enable(required=False))
    """)
    message, cause, enabled = printed.splitlines()
    assert says in message
    assert "Install a CUDA build" in message
    assert says.startswith(cause)
    assert enabled == "False"


def test_every_warning_points_at_the_line_that_enables() -> None:
    lines = succeed(
        """
        import sys, warnings
        import rallocator
        sys.modules["torch"] = None
        def ask():
            rallocator.enable("policy:native,move:off,throw_on_cudamalloc_oom:True", required=False)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ask()
        print([warning.lineno - ask.__code__.co_firstlineno for warning in seen])
        """,
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    assert lines == "[1, 1, 1, 1]"
