"""Where a decode step's time goes, node by node, in two or more decode graphs with the same inputs.

    python benchmarks/decode_nodes.py out/int8/decode.onnx build/peers/genai-int8/model.onnx

Each graph takes single steps over KV buffers while ONNX Runtime profiles it, the graphs in turns. Of every node the
shortest of its times counts: what other programs take away only ever adds, though a node of several milliseconds is
seldom left alone on a busy machine. The step as a whole is therefore given in CPU time of the process too, least and
median. One thread unless told otherwise. The others are compared with the first graph, which has to state the sizes of
its KV buffers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import onnxruntime as ort

CAPACITY_MARGIN = 16  # places of the KV buffers beyond those in use


class Graph:
    """A decode graph, open for single steps over KV buffers that are past and present at once."""

    def __init__(
        self, path: Path, threads: int, num_past: int, sizes: dict[str, tuple[int, int]], profile: Path
    ) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
        self.path = path
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        outputs = {value.name for value in self._session.get_outputs()}
        random = np.random.default_rng(0)
        for value in self._session.get_inputs():
            if value.name in ("input_ids", "attention_mask"):
                shape = (1, 1) if value.name == "input_ids" else (1, num_past + 1)
                self._binding.bind_ortvalue_input(
                    value.name, ort.OrtValue.ortvalue_from_numpy(np.ones(shape, np.int64))
                )
                continue
            num_heads, head_size = sizes[value.name]
            shape = (1, num_heads, num_past + CAPACITY_MARGIN, head_size)
            kind = np.float16 if "float16" in value.type else np.float32
            buffer = ort.OrtValue.ortvalue_from_numpy(random.normal(size=shape).astype(kind))
            self._binding.bind_ortvalue_input(value.name, buffer)
            present = value.name.replace("past_key_values", "present")
            if present not in outputs:
                raise SystemExit(f"{path}: expected the output {present} for the input {value.name}, found none")
            self._binding.bind_ortvalue_output(present, buffer)
        self._binding.bind_output("logits")

    def step(self) -> None:
        """Compute one token."""
        self._session.run_with_iobinding(self._binding)

    def times_us(self) -> dict[str, float]:
        """Return the shortest time of each kind of node, summed over its nodes, and end the profile.

        A kind is the operator, and for products the width of what they give: `MatMulNBits to 1536`.
        """
        events = json.loads(Path(self._session.end_profiling()).read_text(encoding="utf-8"))
        shortest: dict[str, float] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                name = event["name"]
                shortest[name] = min(shortest.get(name, float("inf")), event["dur"])
        operators = {event["name"]: event["args"] for event in events if event["name"] in shortest}
        kinds: dict[str, float] = defaultdict(float)
        for name, duration in shortest.items():
            kinds[_kind(operators[name])] += duration
        return dict(kinds)


def _kind(arguments: dict[str, object]) -> str:
    """Return the operator of a profiled node, a large product with the elements of its output."""
    operator = str(arguments["op_name"])
    if not operator.startswith("MatMul"):
        return operator
    (output,) = arguments["output_type_shape"]  # type: ignore[misc]
    (shape,) = output.values()  # type: ignore[attr-defined]
    return f"{operator} to {shape[-1]}" + (f", {shape[0]} rows" if len(shape) == 2 and shape[0] > 1 else "")


def main() -> None:
    """Measure and print one column per graph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", type=Path, metavar="GRAPH")
    parser.add_argument("--past", type=int, default=128, help="tokens in the KV buffers (default 128)")
    parser.add_argument("--steps", type=int, default=60, help="of each graph (default 60)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    sizes = kv_sizes(arguments.graphs[0])
    with tempfile.TemporaryDirectory() as folder:
        graphs = [
            Graph(path, arguments.threads, arguments.past, sizes, Path(folder) / f"profile-{index}")
            for index, path in enumerate(arguments.graphs)
        ]
        steps_ms: list[list[float]] = [[] for _ in graphs]
        for _ in range(arguments.steps):
            for graph, times in zip(graphs, steps_ms, strict=True):
                started = time.process_time()
                graph.step()
                times.append((time.process_time() - started) * 1e3)
        columns = [graph.times_us() for graph in graphs]
    for index, graph in enumerate(graphs):
        print(f"{index}: {graph.path}")
    print(_row("step, CPU, least", [min(times) * 1e3 for times in steps_ms]))
    print(_row("step, CPU, median", [median(times) * 1e3 for times in steps_ms]))
    print(table(columns))


def kv_sizes(path: Path) -> dict[str, tuple[int, int]]:
    """Return KV heads and head size of each KV input."""
    inputs = onnx.load(path, load_external_data=False).graph.input
    shapes = {value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in inputs}
    return {name: (shape[1], shape[3]) for name, shape in shapes.items() if len(shape) == 4}


def table(columns: list[dict[str, float]]) -> str:
    """Return milliseconds of each kind in each graph, the costliest first, and the sums."""
    totals = [sum(column.values()) for column in columns]
    rows = [_row("all nodes", totals), _row("over graph 0", [total / totals[0] * 1e3 for total in totals])]
    kinds = {kind for column in columns for kind in column}
    ordered = sorted(kinds, key=lambda kind: -max(column.get(kind, 0.0) for column in columns))
    return "\n".join(rows + [_row(kind, [column.get(kind, 0.0) for column in columns]) for kind in ordered])


def _row(name: str, microseconds: Iterable[float]) -> str:
    return f"{name:36}" + "".join(f"{duration / 1e3:10.3f}" for duration in microseconds)


if __name__ == "__main__":
    main()
