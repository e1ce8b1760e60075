"""What an engine depends on besides its bundle: the device, its driver and the libraries' versions."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pop_runtime.open_provider import missing_provider, onnxruntime, require_provider
from pop_runtime.providers import Target

CPU_INFO = Path("/proc/cpuinfo")
NVIDIA_QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")


@dataclass(frozen=True)
class Machine:
    """The device that a target names, as far as engines depend on it."""

    device: str  # such as "NVIDIA H200, 9.0"
    driver: str | None
    versions: dict[str, str]  # of the libraries

    @property
    def slug(self) -> str:
        """The device's name as a part of a folder's."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:40]


def describe_machine(target: Target) -> Machine:
    """Return what engines for the target depend on.

    Raises:
        BackendError: the provider or the device is missing.
    """
    devices = require_provider(target)
    versions = {"onnxruntime": onnxruntime.__version__}
    if devices:
        versions |= {f"plugin {key}": str(value) for key, value in sorted(devices[0].ep_metadata.items())}
    if target.provider.memory == "cuda":
        name, driver = _nvidia_gpu(target)
        versions |= _nvidia_versions(target)
        return Machine(name, driver, versions)
    if devices and target.device:
        return Machine(f"{devices[0].device.vendor} {devices[0].device.device_id}", None, versions)
    return Machine(_cpu_name(), None, versions)


def _cpu_name() -> str:
    """Return the processor's name and a digest of its instruction sets, which optimised graphs may depend on."""
    text = CPU_INFO.read_text(errors="replace") if CPU_INFO.is_file() else ""
    fields = dict(re.findall(r"^(model name|flags|Features)\s*:\s*(.*)$", text, re.MULTILINE))
    flags = " ".join(sorted((fields.get("flags") or fields.get("Features") or "").split()))
    digest = hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:8]
    return f"{fields.get('model name') or platform.processor() or platform.machine()} {digest}"


def _nvidia_gpu(target: Target) -> tuple[str, str]:
    """Return name with compute capability, and driver version, of the target's GPU."""
    try:
        query = [*NVIDIA_QUERY, f"--id={target.device}"]
        line = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        name, capability, driver = (part.strip() for part in line.splitlines()[0].rsplit(",", 2))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        raise missing_provider(target, "no GPU of that number (nvidia-smi)") from error
    return f"{name}, {capability}", driver


def _nvidia_versions(target: Target) -> dict[str, str]:
    """Return the versions of CUDA and, for TensorRT, of its library."""
    versions = {"cuda": str(getattr(onnxruntime, "cuda_version", "unknown"))}
    if target.ep == "tensorrt":
        try:
            library: Any = ctypes.CDLL("libnvinfer.so.10")
        except OSError as error:
            raise missing_provider(target, "no libnvinfer.so.10") from error
        versions["tensorrt"] = str(library.getInferLibVersion())
    return versions
