"""`rallocator doctor`."""

from __future__ import annotations

from rallocator import _doctor
from rallocator._cli.console import print_json, print_table, print_text
from rallocator._sizes import format_size


def run(*, as_json: bool) -> bool:
    """Print what was found out and return whether rallocator works here."""
    report = _doctor.examine()
    if as_json:
        print_json([report.to_json()])
        return report.works
    print_table([("", "name"), ("", "text")], _lines(report))
    print_text("")
    if report.settings_reason:
        print_text(f"Settings: {report.settings_reason}")
    else:
        columns = [("setting", "name"), ("value", "text"), ("from", "name")]
        print_table(columns, [(setting.key, setting.value, setting.source) for setting in report.settings])
    for setting in report.inert:
        print_text(f"{setting.key}:{setting.value} from {setting.source} changes nothing here")
    for setting in report.host:
        print_text(f"{setting.key}:{setting.value} from {setting.source} is torch's own, for pinned host memory")
    if report.caching_note:
        print_text(report.caching_note)
    print_text("", "rallocator works here." if report.works else "rallocator does not work here.")
    return report.works


def _lines(report: _doctor.Report) -> list[tuple[str, str]]:
    torch = "cannot be imported" if report.torch is None else f"{report.torch}, {_built_for(report)}"
    lines = [
        ("rallocator", f"{report.rallocator}, on Python {report.python}"),
        ("torch", torch),
        ("driver", report.driver or "its version is not known"),
    ]
    for device in report.devices:
        policy = "native only" if device.virtual_memory_missing else "native, expandable, rallocator"
        reason = f": {device.virtual_memory_missing}" if device.virtual_memory_missing else ""
        lines.append((f"GPU {device.index}", f"{format_size(device.total_bytes)}; policies: {policy}{reason}"))
    if report.devices_reason:
        lines.append(("GPU", f"none: {report.devices_reason}"))
    route = f"{report.attach}: {report.attach_reason}" if report.attach else f"not possible: {report.attach_reason}"
    lines.append(("attach", route))
    return lines


def _built_for(report: _doctor.Report) -> str:
    return "built without CUDA" if report.torch_cuda is None else f"built for CUDA {report.torch_cuda}"
