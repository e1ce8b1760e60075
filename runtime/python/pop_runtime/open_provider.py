"""Open a session on one provider, with no way to another: neither for the graph nor for a node."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pop_runtime.errors import BackendError
from pop_runtime.providers import Provider, Target

try:
    import onnxruntime
except ModuleNotFoundError as missing:  # the base install leaves the choice of CPU or GPU package to an extra
    raise BackendError("onnxruntime: expected the package, found none; pip install 'pop-export[cpu]'") from missing

CPU_NAME = "CPUExecutionProvider"


def require_provider(target: Target) -> list[Any]:
    """Return the devices of a provider that comes as a package of its own; nothing for one that is built in.

    Raises:
        BackendError: the provider is not installed, or has no such device (says what to install).
    """
    provider = target.provider
    if provider.ort_name in onnxruntime.get_available_providers():
        return []
    if provider.plugin is None:
        raise missing_provider(target, f"{', '.join(onnxruntime.get_available_providers())} alone")
    try:
        plugin = importlib.import_module(provider.plugin)
    except ModuleNotFoundError as error:
        raise missing_provider(target, "none") from error
    devices = _plugin_devices(provider)
    if not devices:
        try:
            onnxruntime.register_execution_provider_library(provider.ort_name, plugin.get_library_path())
        except Exception as error:  # ONNX Runtime's errors share no base but Exception
            raise missing_provider(target, " ".join(str(error).split())) from error
        devices = _plugin_devices(provider)
    if target.device >= len(devices):
        raise missing_provider(target, f"{len(devices)} devices that it can use")
    return [devices[target.device]]


def _plugin_devices(provider: Provider) -> list[Any]:
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider.ort_name]


def missing_provider(target: Target, found: str) -> BackendError:
    """Return the error for a provider, or a device of it, that is not there."""
    return BackendError(
        f"--ep {target.ep} --device {target.device}: expected {target.provider.ort_name} in onnxruntime "
        f"{onnxruntime.__version__}, found {found}; {target.provider.install}"
    )


def open_on(
    target: Target, graph: str | bytes, options: onnxruntime.SessionOptions, provider_options: dict[str, str]
) -> onnxruntime.InferenceSession:
    """Return a session of which every node runs on the target's provider, but for what the table grants the CPU.

    Args:
        target: provider and device.
        graph: path or content.
        options: of the session; the settings that forbid a fallback are added to it.
        provider_options: of the provider.

    Raises:
        BackendError: the provider is missing, or the session or a node came to rest on another one.
        Exception: whatever ONNX Runtime raises for the graph itself.
    """
    provider, devices = target.provider, require_provider(target)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if provider.ort_name != CPU_NAME and not provider.cpu_operators:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if devices:
        options.add_provider_for_devices(devices, provider_options)
        session = onnxruntime.InferenceSession(graph, options, enable_fallback=0)
    else:
        providers = [(provider.ort_name, provider_options)]
        session = onnxruntime.InferenceSession(graph, options, providers=providers, enable_fallback=0)
    if provider.ort_name not in session.get_providers():  # its libraries did not load: only a warning to ONNX Runtime
        raise missing_provider(target, f"{', '.join(session.get_providers())} once a graph was opened")
    check_nodes(target, session.get_provider_graph_assignment_info())
    return session


def check_nodes(target: Target, subgraphs: Iterable[Any]) -> None:
    """Refuse a graph of which a node runs elsewhere than on the target's provider.

    Args:
        target: whose provider should have all nodes.
        subgraphs: what ONNX Runtime says of them: each with `ep_name` and `get_nodes()`.

    Raises:
        BackendError: names the operators and how often each occurs.
    """
    provider, strays = target.provider, Counter[str]()
    for subgraph in subgraphs:
        if subgraph.ep_name == provider.ort_name:
            continue
        for node in subgraph.get_nodes():
            if node.op_type not in provider.cpu_operators or subgraph.ep_name != CPU_NAME:
                strays[f"{node.op_type} on {subgraph.ep_name}"] += 1
    if strays:
        found = ", ".join(f"{count} x {name}" for name, count in strays.most_common())
        raise BackendError(
            f"--ep {target.ep}: expected every node on {provider.ort_name}, found {found}; export with --dialect "
            "standard or another --precision, or choose another provider"
        )


def nodes_by_provider(session: onnxruntime.InferenceSession) -> dict[str, int]:
    """Return how many nodes of a session each provider runs, by ONNX Runtime's name of it."""
    counts = Counter[str]()
    for subgraph in session.get_provider_graph_assignment_info():
        counts[subgraph.ep_name] += len(subgraph.get_nodes())
    return dict(counts)
