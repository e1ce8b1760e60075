"""A decode step whose inputs and outputs keep their place and their size, which is what CUDA can record and replay.

A step of a small model is hundreds of kernels, each of which the CPU has to launch; a recorded graph of them is one
launch. ONNX Runtime records runs of a session that was opened for it, and tells recordings apart by a number in the
run's options. It replays one without looking at what is bound: addresses and sizes have to be those it was recorded
with.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from pop_runtime.device_buffer import read, where, write, zeros
from pop_runtime.open_provider import onnxruntime

if TYPE_CHECKING:
    from pop_runtime.kv_cache import KvCache

RECORDING = "gpu_graph_id"  # entry of the run's options that tells recordings apart
NOT_RECORDED = "-1"
INT64 = 7  # TensorProto.DataType
_numbers = count(1)  # ONNX Runtime keeps 0 for itself


class FixedStep:
    """The decode graph bound for single tokens: the same buffers at every step, the mask as wide as the cache.

    Args:
        session: the decode graph, opened to be recorded; on a provider that records nothing it just runs.
        cache: its buffers are past and present at once.
        logits: numpy type in which logits are stored, and their ONNX type.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, cache: KvCache, logits: tuple[type[np.generic], int]
    ) -> None:
        manifest, place, batch = cache.manifest, cache.place, cache.batch
        self._session, self._cache, self._binding = session, cache, session.io_binding()
        cache.bind(self._binding)
        self._positions = np.arange(cache.capacity)
        self._ids = zeros((batch, 1), np.int64, place)
        self._mask = zeros((batch, cache.capacity), np.int64, place)
        self._logits = zeros((batch, 1, manifest.vocab_size), logits[0], place)
        self._binding.bind_input(manifest.input_ids, *where(self._ids, INT64, place))
        self._binding.bind_input(manifest.attention_mask, *where(self._mask, INT64, place))
        self._binding.bind_output(manifest.logits, *where(self._logits, logits[1], place))
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry(RECORDING, str(next(_numbers)))

    def run(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Feed one token of each row, write its K and V in place and return the logits [B, 1, V] as they are stored.

        Args:
            ids: [B, 1] int64.
            lengths: [B] int64, tokens of each row after this step.
        """
        write(self._ids, ids)
        write(self._mask, (self._positions < lengths[:, None]).astype(np.int64))
        self._session.run_with_iobinding(self._binding, self._options)
        return read(self._logits)
